//! Retention and a check of the rules. There is no file, so there is nothing to back up.

use std::path::PathBuf;

use everbus_core::{BoxFuture, CheckReport, Code, Error, Maintenance, Pruned, Result, Retention};

use crate::broker::Memory;

impl Memory {
    fn prune_records(&self, retention: &Retention) -> Result<Pruned> {
        let mut state = self.open_state()?;
        let now = self.now();
        let too_many = retention
            .max_len
            .map_or(0, |max| state.records.len().saturating_sub(max));
        let mut over = Vec::new();
        for (index, record) in (0u64..).zip(state.records.after(0)) {
            let too_old = retention
                .max_age
                .is_some_and(|age| record.received_at.plus(age) < now);
            // Both limits take from the front: the first event within them ends the search.
            if !too_old && index >= too_many {
                break;
            }
            over.push(record.clone());
        }
        let mut pruned = Pruned::default();
        for record in over {
            if state.is_needed(&record) {
                pruned.kept += 1;
            } else {
                state.remove(record.position, now);
                pruned.removed += 1;
            }
        }
        Ok(pruned)
    }

    fn check_rules(&self) -> Result<CheckReport> {
        let state = self.open_state()?;
        let mut report = CheckReport::default();
        for group in state.groups.values() {
            let wrong = group.contradiction(|position| state.dead.is_open(position, &group.name));
            let check = format!("every event of group {} is in one state", group.name);
            let ok = wrong.is_none();
            report.add(check, ok, wrong.unwrap_or_else(|| "it is".to_string()));
        }
        Ok(report)
    }
}

impl Maintenance for Memory {
    fn check(&self) -> BoxFuture<'_, Result<CheckReport>> {
        Box::pin(async move { self.check_rules() })
    }

    fn backup(
        &self,
        _target: PathBuf,
        _progress: Box<dyn FnMut(u64, u64) + Send>,
    ) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            drop(self.open_state()?);
            let what = "the memory engine has no file to back up";
            Err(Error::new(Code::Unsupported, what)
                .hint("open the bus on a file: sqlite:events.db"))
        })
    }

    fn prune(&self, retention: Retention) -> BoxFuture<'_, Result<Pruned>> {
        Box::pin(async move { self.prune_records(&retention) })
    }
}
