//! Events that no group gets before their time: they are copied from the log, so that the source can be left.

use std::sync::Arc;

use everbus_core::{Code, Cursor, Error, Event, GroupInfo, Recorded, Result, StartFrom};

use super::carry::Carried;
use super::route::Route;
use super::stats::Counters;
use super::{BATCH, Bridge};

impl Bridge {
    /// Copies the events that wait for their time, if they are all that is left. They stay pending at the source.
    /// Returns whether that was so.
    pub(super) async fn carry_scheduled(&self, route: &Route, info: &GroupInfo) -> Result<bool> {
        let Some(oldest) = info.oldest else {
            return Ok(false);
        };
        let Ok(log) = self.from.engine().log() else {
            let what = format!(
                "{} events of {} wait, and the log of the source cannot be read",
                info.lag().unsettled(),
                self.group
            );
            return Err(Error::new(Code::Unsupported, what)
                .hint("run the bridge until their time has come"));
        };
        let start = log
            .resolve(StartFrom::Time(oldest), route.patterns.clone())
            .await?;
        let head = log.head().await?;
        // Counted first: something else may be left.
        let mut waiting = 0;
        self.each_scheduled(&start, &head, route, async |events| {
            waiting += events.len() as u64;
            Ok(())
        })
        .await?;
        if waiting != info.lag().unsettled() {
            return Ok(false);
        }
        let mut complete = true;
        self.each_scheduled(&start, &head, route, async |events| {
            let events: Vec<&Event> = events.iter().map(|record| &record.event).collect();
            for carried in self.store(route.mark, &events).await? {
                match carried {
                    Carried::Stored { duplicate: false } => {
                        Counters::add(&self.counters.moved, 1);
                    }
                    Carried::Stored { duplicate: true } => {
                        Counters::add(&self.counters.duplicates, 1);
                    }
                    Carried::Refused(error) => return Err(error),
                    Carried::GivenUp => complete = false,
                }
            }
            Ok(())
        })
        .await?;
        Ok(complete)
    }

    /// Visits the events between the cursors that the group gets later.
    async fn each_scheduled(
        &self,
        start: &Cursor,
        head: &Cursor,
        route: &Route,
        mut visit: impl AsyncFnMut(Vec<Arc<Recorded>>) -> Result<()>,
    ) -> Result<()> {
        let log = self.from.engine().log()?;
        let now = self.from.shared().options.clock.now();
        let mut cursor = start.clone();
        loop {
            let (mut records, searched) =
                log.read(cursor.clone(), route.patterns.clone(), BATCH).await?;
            records.retain(|record| {
                let due = record.event.attributes().and_then(|a| a.not_before);
                due.is_some_and(|due| due > now) && record.event.is_for(&self.group)
            });
            if !records.is_empty() {
                visit(records).await?;
            }
            let stuck = cursor.reaches(&searched);
            cursor.advance_to(&searched);
            if stuck || cursor.reaches(head) {
                return Ok(());
            }
        }
    }
}
