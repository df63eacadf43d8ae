"""Control messages between engines, and the road to the metaserver. The messages are `ascend_pd.wire.messages`."""
