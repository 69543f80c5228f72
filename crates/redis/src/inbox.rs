//! Which events each group has handled, in a sorted set by time.

use std::sync::Arc;

use everbus_core::{BoxFuture, GroupName, Inbox, Recorded, Result, Timestamp};
use redis::Value;

use crate::broker::Redis;
use crate::client::Read as _;
use crate::wire;

impl Inbox for Redis {
    fn handled(
        &self,
        group: GroupName,
        events: Vec<Arc<Recorded>>,
    ) -> BoxFuture<'_, Result<Vec<bool>>> {
        Box::pin(async move {
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            if events.is_empty() {
                return Ok(Vec::new());
            }
            let mut scores = redis::cmd("ZMSCORE");
            scores.arg(shared.space.own(&format!("inbox:{}", group.as_str())));
            for record in &events {
                scores.arg(wire::id_name(&record.event));
            }
            let scores = shared.link.ask(&scores).await?.list()?;
            Ok(scores.iter().map(|score| *score != Value::Nil).collect())
        })
    }

    fn forget(&self, before: Timestamp) -> BoxFuture<'_, Result<u64>> {
        Box::pin(async move {
            let shared = &self.shared;
            let _running = shared.link.enter()?;
            let mut forgotten = 0;
            for (record, _) in shared.load_groups().await? {
                let mut remove = redis::cmd("ZREMRANGEBYSCORE");
                remove.arg(shared.space.own(&format!("inbox:{}", record.name)));
                remove
                    .arg("-inf")
                    .arg(format!("({}", before.as_micros() / 1000));
                forgotten += shared.link.ask(&remove).await?.number()?;
            }
            Ok(forgotten)
        })
    }
}
