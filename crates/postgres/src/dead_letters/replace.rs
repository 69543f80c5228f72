//! Appending a corrected event in place of a dead letter, for the one group that failed.
//!
//! The corrected event is addressed to that group and stands at the end of the log. The group reaches it in
//! the order of the log, and the other groups skip it.

use everbus_core::dead_letters::{check_replacement, id_taken, not_open};
use everbus_core::{Appended, Code, DeadLetterKey, Event, Result};

use crate::Postgres;
use crate::append::append_in;
use crate::groups;
use crate::pool::{Params, Sql as _, transaction};
use crate::rows::{stored_at, to_sql};

impl Postgres {
    /// Replaces an open dead letter.
    pub(super) async fn replace_letter(
        &self,
        key: DeadLetterKey,
        corrected: Event,
    ) -> Result<Appended> {
        self.check_open()?;
        let corrected = corrected.addressed_to(&key.group);
        let doing = "replacing a dead letter";
        let seq = key.position.place();
        let appended: Appended = transaction!(self.pool, doing, |tx| {
            let group = groups::find(tx, &key.group)
                .await?
                .ok_or_else(|| not_open(&key))?;
            let locked = groups::lock(tx, group.id)
                .await?
                .ok_or_else(|| not_open(&key))?;
            let group = locked.group;
            let sql = "SELECT 1 FROM everbus.dead_letters
                       WHERE seq = $1 AND group_id = $2 AND retried_at IS NULL FOR UPDATE";
            let open = tx.first(doing, sql, &[&to_sql(seq), &group.id]).await?;
            let original = stored_at(tx, &self.types, seq).await?;
            let (Some(_), Some(original)) = (open, original) else {
                return Err(not_open(&key));
            };
            check_replacement(&original.record.event, &corrected)?;
            let answers = append_in(self, tx, &[&corrected])
                .await
                .map_err(|e| match e.code() {
                    Code::IdReused => id_taken(&corrected),
                    _ => e,
                })?;
            let appended = answers
                .into_iter()
                .next()
                .filter(|answer| !answer.duplicate);
            let appended = appended.ok_or_else(|| id_taken(&corrected))?;
            if !group.wants(corrected.event_type()) {
                // The group has other patterns by now and would skip the event, so it gets a row.
                let place = to_sql(appended.position.place());
                self.wait_again(tx, &group, &[place]).await?;
            }
            let sql = "UPDATE everbus.dead_letters SET retried_at = $3, replaced_by = $4
                       WHERE seq = $1 AND group_id = $2";
            let (now, by) = (self.micros(), corrected.id().as_uuid());
            let values: Params<'_> = &[&to_sql(seq), &group.id, &now, &by];
            tx.execute(doing, sql, values).await?;
            Ok(appended)
        })?;
        self.bell.ring();
        Ok(appended)
    }
}
