"""The file breaks the schema: unknown key, wrong type, missing value, repeated key, anchor or tag.

Every mistake is reported at once with its path and line, and an unknown key with the nearest known one. Nothing
else is judged until the file can be read.

Fix: follow the path and line; `deploy/schema/pdcluster.schema.json` gives an editor completion and checks while
you type.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding
from ascend_pd.check.subject import Subject

NAME = "spec-invalid"
SEVERITY = "error"
ZH = """文件不符合模式：未知键、类型错误、缺少值、重复键、锚点或标签。

所有错误一次全部报告，附路径与行号；未知键会给出最接近的已知键。文件可读之前不再判断其他内容。

处理：按路径与行号修改；`deploy/schema/pdcluster.schema.json` 可让编辑器在输入时补全并检查。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """A subject exists only once the file is well formed: the reader itself reports under this name."""
    yield from ()
