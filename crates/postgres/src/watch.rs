//! Waiting until an event is settled.

use std::time::Duration;

use everbus_core::{
    BoxFuture, Code, Error, GroupName, Pattern, Position, Result, Settled, SettledOutcome,
};

use crate::Postgres;
use crate::pool::Sql as _;
use crate::rows::{get, to_sql};

/// How often to look: another engine may settle the event, and sends no notification then.
const POLL: Duration = Duration::from_millis(100);

/// The state of one event in every group, as far as it matters here.
const STANDING: &str = "SELECT g.name, g.cursor < $1,
    EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = g.id AND d.seq = $1)
      OR EXISTS (SELECT 1 FROM everbus.claims c
        WHERE c.group_id = g.id AND $1 BETWEEN c.lo AND c.hi AND NOT c.done @> $1),
    EXISTS (SELECT 1 FROM everbus.dead_letters d
      WHERE d.seq = $1 AND d.group_id = g.id AND d.retried_at IS NULL),
    EXISTS (SELECT 1 FROM everbus.skips s WHERE s.group_id = g.id AND s.seq = $1),
    ARRAY (SELECT s.event_type FROM everbus.subscriptions s WHERE s.group_id = g.id)
  FROM everbus.groups g WHERE g.declared_at < $1 AND (g.owner IS NULL OR g.owner = $2)
  ORDER BY g.name";

impl Postgres {
    /// How an event was settled; `None` while some group has yet to settle it. The ephemeral groups of other engines
    /// are not waited for, because it is not known whether they still exist.
    async fn outcome(&self, position: Position) -> Result<Option<SettledOutcome>> {
        let doing = "looking whether an event is settled";
        let conn = self.conn().await?;
        let seq = to_sql(position.place());
        let sql = "SELECT t.name, l.address FROM everbus.log l
                   JOIN everbus.types t ON t.id = l.type WHERE l.seq = $1";
        let Some(event) = conn.first(doing, sql, &[&seq]).await? else {
            let what = format!("there is no event at {position}");
            return Err(Error::new(Code::NotFound, what));
        };
        let (event_type, address): (&str, Option<&str>) = (get(&event, 0)?, get(&event, 1)?);
        let mut outcome = SettledOutcome::default();
        let owner = self.session().owner();
        for row in conn.query(doing, STANDING, &[&seq, &owner]).await? {
            let name: GroupName = get::<&str>(&row, 0)?.parse()?;
            let (to_come, has, dead): (bool, bool, bool) =
                (get(&row, 1)?, get(&row, 2)?, get(&row, 3)?);
            if has {
                return Ok(None);
            }
            if dead {
                outcome.dead_lettered.push(name);
                continue;
            }
            let skipped: bool = get(&row, 4)?;
            if to_come && !skipped && name.receives(address) {
                let patterns: Vec<&str> = get(&row, 5)?;
                for text in patterns {
                    if Pattern::new(text)?.matches(event_type) {
                        return Ok(None);
                    }
                }
            }
        }
        Ok(Some(outcome))
    }

    async fn wait_settled(&self, position: Position) -> Result<SettledOutcome> {
        loop {
            let mut changed = std::pin::pin!(self.bell.here.notified());
            let mut settled = std::pin::pin!(self.bell.settled.notified());
            // Registered before the look, so that no ring between the two is lost.
            changed.as_mut().enable();
            settled.as_mut().enable();
            if let Some(outcome) = self.outcome(position).await? {
                return Ok(outcome);
            }
            tokio::select! {
                () = changed => {}
                () = settled => {}
                () = tokio::time::sleep(POLL) => {}
            }
        }
    }
}

impl Settled for Postgres {
    fn settled(
        &self,
        position: Position,
        timeout: Duration,
    ) -> BoxFuture<'_, Result<SettledOutcome>> {
        Box::pin(async move {
            self.check_open()?;
            let waited = tokio::time::timeout(timeout, self.wait_settled(position)).await;
            waited.unwrap_or_else(|_| {
                let what = format!("event {position} was not settled within {timeout:?}");
                Err(Error::new(Code::Timeout, what))
            })
        })
    }
}
