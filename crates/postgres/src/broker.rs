//! The methods of a broker. Their work is in the files of the roles.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use everbus_core::{
    Appended, BoxFuture, Broker, Capabilities, ConsumeOptions, Consumer, Event, EventId, GroupInfo,
    GroupName, GroupSpec, Lease, Result, Settlement, SubscriptionInfo,
};

use crate::Postgres;
use crate::consumer::PgConsumer;
use crate::effect::ENGINE;
use crate::groups;
use crate::pool::Sql as _;

/// The broker is shared with its consumers through an `Arc`.
pub(crate) struct PgBroker(pub(crate) Arc<Postgres>);

impl Broker for PgBroker {
    fn capabilities(&self) -> Capabilities {
        Capabilities::full(ENGINE, self.0.durability.grade).transaction(Some(ENGINE))
    }

    fn declare(&self, group: GroupSpec) -> BoxFuture<'_, Result<Vec<SubscriptionInfo>>> {
        Box::pin(self.0.declare_group(group))
    }

    fn retract(&self, subscription: EventId) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.retract_subscription(subscription))
    }

    fn remove_group(&self, group: GroupName) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.0.remove_group_named(&group).await })
    }

    fn append(&self, batch: Vec<Event>) -> BoxFuture<'_, Result<Vec<Result<Appended>>>> {
        Box::pin(self.0.append_batch(batch))
    }

    fn consume(
        &self,
        group: GroupName,
        options: ConsumeOptions,
    ) -> BoxFuture<'_, Result<Box<dyn Consumer>>> {
        Box::pin(async move {
            self.0.check_open()?;
            let group = groups::by_name(&*self.0.conn().await?, &group).await?;
            let owner = self.0.become_owner().await?;
            self.0.recover().await?;
            let consumer = PgConsumer::new(self.0.clone(), group.id, owner, options);
            Ok(Box::new(consumer) as Box<dyn Consumer>)
        })
    }

    fn settle(&self, settlements: Vec<Settlement>) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(self.0.settle_batch(settlements))
    }

    fn extend(&self, leases: Vec<Lease>, by: Duration) -> BoxFuture<'_, Result<Vec<Result<()>>>> {
        Box::pin(async move { self.0.extend_leases(&leases, by).await })
    }

    fn inspect(&self) -> BoxFuture<'_, Result<Vec<GroupInfo>>> {
        Box::pin(self.0.inspect_groups())
    }

    fn ping(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let db = self.0.conn().await?;
            db.query("asking the server for an answer", "SELECT 1", &[])
                .await
                .map(drop)
        })
    }

    fn close(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            if self.0.closed.swap(true, Ordering::AcqRel) {
                return Ok(());
            }
            self.0.bell.ring_here();
            let left = self.0.leave().await;
            self.0.session().stop();
            self.0.pool.close();
            self.0.bell.ring_here();
            left
        })
    }
}
