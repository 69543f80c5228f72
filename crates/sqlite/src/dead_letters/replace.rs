//! Appending a corrected event in place of a dead letter, for the one group that failed.
//!
//! The corrected event is addressed to that group and stands at the end of the log. The group reaches it in
//! the order of the log, and the other groups skip it.

use everbus_core::dead_letters::{check_replacement, id_taken, not_open};
use everbus_core::{Appended, Code, DeadLetterKey, Event, Result};
use rusqlite::params;

use crate::append::Appender;
use crate::rows::{micros, stored_at, to_sql};
use crate::settle::insert_waiting;
use crate::sql::Sql as _;
use crate::tx::Tx;

/// Replaces an open dead letter. The inner error refuses only this command, with nothing done.
pub(crate) fn replace(
    tx: &mut Tx,
    key: &DeadLetterKey,
    corrected: Event,
) -> Result<Result<Appended>> {
    let doing = "replacing a dead letter";
    let Some(group) = tx.groups.id_of(&key.group) else {
        return Ok(Err(not_open(key)));
    };
    let open: Option<()> = tx.conn.read_first(
        doing,
        "SELECT 1 FROM dead_letters
         WHERE seq = ?1 AND group_id = ?2 AND retried_at IS NULL",
        (to_sql(key.position.place()), group),
        |_| Ok(()),
    )?;
    let original = stored_at(&tx.conn, key.position.place(), &mut tx.log.type_names)?;
    let (Some(()), Some(original)) = (open, original.map(|stored| stored.record)) else {
        return Ok(Err(not_open(key)));
    };
    if let Err(refused) = check_replacement(&original.event, &corrected) {
        return Ok(Err(refused));
    }
    let corrected = corrected.addressed_to(&key.group);
    let (id, event_type) = (corrected.id(), corrected.type_arc().clone());
    let taken = id_taken(&corrected);
    let now = tx.clock.now();
    let answers = Appender::new(&tx.conn, &tx.log, now)?.batch(&mut tx.log, vec![corrected]);
    let appended = match answers {
        Ok(answers) => answers.into_iter().next().filter(|a| !a.duplicate),
        Err(e) if e.code() == Code::IdReused => None,
        Err(e) if e.code() == Code::InvalidAttribute => return Ok(Err(e)),
        Err(e) => return Err(e),
    };
    let Some(appended) = appended else {
        return Ok(Err(taken));
    };
    let type_id = tx.log.intern_type(&tx.conn, &event_type)?;
    if !tx.groups.known(group)?.wants(type_id, &event_type) {
        // The group's current patterns do not match the event, and the group would skip it. So the event gets a row.
        insert_waiting(tx, group, appended.position.place(), 0, now, &[])?;
    }
    tx.conn.run(
        doing,
        "UPDATE dead_letters SET retried_at = ?3, replaced_by = ?4
         WHERE seq = ?1 AND group_id = ?2",
        params![
            to_sql(key.position.place()),
            group,
            micros(now),
            id.as_bytes()
        ],
    )?;
    tx.watches.touch(key.position.place());
    Ok(Ok(appended))
}
