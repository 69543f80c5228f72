//! Steps that the writer runs for the indexer thread, each in one transaction.

use std::sync::mpsc;
use std::time::Duration;

use everbus_core::{Error, Result};

use super::work::{Next, Work};
use crate::history::block::Block;
use crate::history::runs::{Applied, Change, End, Target};
use crate::history::runs::{change_history, sweep_history};
use crate::queue::{Answer, Command, Priority};
use crate::writer::Writer;

/// How long to wait until the lease of another process ends.
pub(super) fn wait_for(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0).max(1000))
}

impl Work {
    /// The runs that are being written.
    pub(super) fn begun(&self) -> Vec<i64> {
        let ids = self.merges.iter().map(|merge| merge.output.id);
        ids.filter(|id| *id != 0).collect()
    }

    pub(super) fn sweep(&mut self) -> Result<Result<(), Next>> {
        let (holder, writing) = (self.holder, self.begun());
        let applied = self
            .job(move |writer| sweep_history(&writer.tx.conn, &writer.space, holder, &writing))?;
        Ok(match self.outcome(applied)? {
            Ok(_) | Err(None) => Ok(()),
            Err(Some(next)) => Err(next),
        })
    }

    /// Applies a change in the file. `Err(None)`: the file has changed, and the change must be planned again.
    pub(super) fn change(
        &mut self,
        target: Target,
        blocks: Vec<Block>,
        end: End,
    ) -> Result<Result<i64, Option<Next>>> {
        let change = Change {
            holder: self.holder,
            target,
            blocks,
            end,
        };
        let applied =
            self.job(move |writer| change_history(&writer.tx.conn, &writer.space, &change))?;
        self.outcome(applied)
    }

    fn outcome(&mut self, applied: Applied) -> Result<Result<i64, Option<Next>>> {
        match applied {
            Applied::Done(id) => Ok(Ok(id)),
            Applied::Held(left) => Ok(Err(Some(Next::Wait(wait_for(left))))),
            Applied::Stale => Ok(Err(None)),
            Applied::Failed(error) => Err(error),
        }
    }

    /// Runs a job on the writer and waits for it, unless the engine closes.
    pub(super) fn job(
        &self,
        job: impl FnOnce(&mut Writer) -> Result<Applied> + Send + 'static,
    ) -> Result<Applied> {
        let queue = self.queue.upgrade().ok_or_else(Error::shutdown)?;
        let (reply, answer) = mpsc::channel();
        let failed = reply.clone();
        queue.push(Command::Job {
            job: Some(Box::new(move |writer| {
                let applied = job(writer)?;
                let answer: Answer = Box::new(move || drop(reply.send(Ok(applied))));
                Ok(answer)
            })),
            failed: Box::new(move |error| drop(failed.send(Err(error)))),
            priority: Priority::Now,
        });
        drop(queue);
        loop {
            match answer.recv_timeout(Duration::from_millis(20)) {
                Ok(applied) => return applied,
                Err(mpsc::RecvTimeoutError::Timeout) => self.check_open()?,
                Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Error::shutdown()),
            }
        }
    }
}
