//! Part of the writer: appending a corrected event in place of a dead letter, for the one group that failed.
//!
//! The corrected event is addressed to that group and stands at the end of the log. The group reaches it in
//! the order of the log, and the other groups skip it.

use everbus_core::dead_letters::{check_replacement, id_taken, not_open};
use everbus_core::{Appended, Code, DeadLetterKey, Event, Result};
use rusqlite::{OptionalExtension, params};

use crate::append::Appender;
use crate::errors::from_sqlite;
use crate::rows::{stored_at, to_sql};
use crate::state::micros;
use crate::writer::Writer;

impl Writer {
    /// Replaces an open dead letter. The inner error refuses only this command, with nothing done.
    pub(crate) fn replace(
        &mut self,
        key: &DeadLetterKey,
        corrected: Event,
    ) -> Result<Result<Appended>> {
        let doing = |e| from_sqlite("replacing a dead letter", e);
        let Some(group) = self.state.group_id(&key.group) else {
            return Ok(Err(not_open(key)));
        };
        let open: Option<()> = self
            .conn
            .prepare_cached(
                "SELECT 1 FROM dead_letters
                 WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NULL",
            )
            .and_then(|mut s| {
                s.query_row((to_sql(key.position.place()), group), |_| Ok(()))
                    .optional()
            })
            .map_err(doing)?;
        let original = stored_at(&self.conn, key.position.place(), &mut self.state.type_names)?;
        let (Some(()), Some(original)) = (open, original.map(|stored| stored.record)) else {
            return Ok(Err(not_open(key)));
        };
        if let Err(refused) = check_replacement(&original.event, &corrected) {
            return Ok(Err(refused));
        }
        let corrected = corrected.addressed_to(&key.group);
        let (id, event_type) = (corrected.id(), corrected.type_arc().clone());
        let taken = id_taken(&corrected);
        let now = self.clock.now();
        let answers =
            Appender::new(&self.conn, &self.state, now)?.batch(&mut self.state, vec![corrected]);
        let appended = match answers {
            Ok(answers) => answers.into_iter().next().filter(|a| !a.duplicate),
            Err(e) if e.code() == Code::IdReused => None,
            Err(e) if e.code() == Code::InvalidAttribute => return Ok(Err(e)),
            Err(e) => return Err(e),
        };
        let Some(appended) = appended else {
            return Ok(Err(taken));
        };
        let type_id = self.state.intern_type(&self.conn, &event_type)?;
        if !self.state.group_mut(group)?.wants(type_id, &event_type) {
            // The group has other patterns by now and would skip the event, so it gets a row.
            self.insert_waiting(group, appended.position.place(), 0, now, &[])?;
        }
        self.conn
            .prepare_cached(
                "UPDATE dead_letters SET retried_at = ?3, replaced_by = ?4
                 WHERE seq = ?1 AND group_id = ?2",
            )
            .and_then(|mut s| {
                s.execute(params![
                    to_sql(key.position.place()),
                    group,
                    micros(now),
                    id.as_bytes()
                ])
            })
            .map_err(doing)?;
        self.watches.touch(key.position.place());
        Ok(Ok(appended))
    }
}
