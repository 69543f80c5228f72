//! Writing dead letters, and the events that report them, in one transaction.

use std::sync::Arc;

use everbus_core::dead_letters::last_handler;
use everbus_core::{
    Code, Death, Error, Event, Failure, FailureKind, Recorded, Result, dead_letter_notice, given_up,
};

use crate::Postgres;
use crate::append::{append_in, check_sets};
use crate::outcomes;
use crate::pool::Sql;
use crate::rows::{Stored, get, read_failures, storable, stored_at, to_sql, write_failures};

/// Opens a dead letter, or opens it again: attempts add up, and the time of the first failure stays. Returns
/// the event that reports it, to be appended in the same transaction. An ephemeral group has no dead letters:
/// it skips the event.
pub(crate) async fn bury(
    engine: &Postgres,
    db: &impl Sql,
    group: i64,
    seq: u64,
    death: Death,
) -> Result<Option<Event>> {
    let nature = engine.natures.get(db, group).await?;
    let nature = nature.ok_or_else(crate::groups::removed)?;
    if nature.ephemeral {
        let reason = given_up(death.failures.last());
        write_skips(db, &[(group, seq, reason)], engine.micros()).await?;
        let kept = (death.attempts, death.failures);
        outcomes::keep(db, (group, seq), kept, None, engine.now()).await?;
        return Ok(None);
    }
    let sql =
        "SELECT attempts, failures FROM everbus.dead_letters WHERE seq = $1 AND group_id = $2";
    let before = db
        .first("reading a dead letter", sql, &[&to_sql(seq), &group])
        .await?;
    let death = match before {
        None => death,
        Some(row) => {
            let attempts = u32::try_from(get::<i32>(&row, 0)?).unwrap_or(0);
            // Damaged old failures must not keep new ones from being written.
            let failures = read_failures(Some(get(&row, 1)?)).unwrap_or_default();
            death.after(attempts, failures)
        }
    };
    let record = put(engine, db, group, seq, &death).await?;
    let last = death.failures.last();
    Ok(dead_letter_notice(
        &record,
        &nature.name,
        death.attempts,
        last,
        death.died_at,
    ))
}

/// Opens a dead letter, or opens it again, with all its attempts and failures. `first_seen_at` stays as it was.
pub(crate) async fn put(
    engine: &Postgres,
    db: &impl Sql,
    group: i64,
    seq: u64,
    death: &Death,
) -> Result<Arc<Recorded>> {
    let Some(Stored {
        type_id, record, ..
    }) = stored_at(db, &engine.types, seq).await?
    else {
        let what = format!("event {seq} was delivered but is not in the log");
        return Err(Error::new(Code::Corrupt, what));
    };
    let failures = write_failures(&death.failures).unwrap_or_else(|| "[]".to_owned());
    let sql = "INSERT INTO everbus.dead_letters
                 (seq, group_id, type, attempts, failures, handler, first_seen_at, died_at, event_id)
               VALUES ($1, $2, $3, $4, $5, $6, $7, $7, $8)
               ON CONFLICT (seq, group_id) DO UPDATE SET attempts = excluded.attempts,
                 failures = excluded.failures, handler = excluded.handler, died_at = excluded.died_at,
                 retried_at = NULL";
    let attempts = i32::try_from(death.attempts).unwrap_or(i32::MAX);
    let handler = last_handler(&death.failures).map(storable);
    let event_id = storable(&record.event.display_id());
    let died_at = death.died_at.as_micros();
    let values: crate::pool::Params<'_> = &[
        &to_sql(seq),
        &group,
        &type_id,
        &attempts,
        &failures,
        &handler,
        &died_at,
        &event_id,
    ];
    db.execute("writing a dead letter", sql, values).await?;
    Ok(record)
}

/// Dead-letters a damaged event for a group. The row of the log stays as it is, no handler sees it, and the
/// group goes on.
pub(crate) async fn bury_damaged(
    engine: &Postgres,
    db: &impl Sql,
    group: i64,
    damaged: &Stored,
    attempt: u32,
    failures: Vec<Failure>,
) -> Result<Option<Event>> {
    let now = engine.now();
    let damage = damaged.damage.as_deref().unwrap_or_default();
    let error = format!("what is stored of this event is damaged: {damage}");
    tracing::error!(
        target: "everbus::dispatch",
        position = damaged.seq(),
        group,
        dead_lettered = true,
        error,
        "an event is dead-lettered"
    );
    let damage = Failure::new(attempt, now, FailureKind::Corrupt, error);
    // One more than the real count: `Death::new` subtracts a last failure that was not an attempt.
    let death = Death::new(attempt + 1, failures, Some(damage), now);
    bury(engine, db, group, damaged.seq(), death).await
}

/// Appends the events that report dead letters.
pub(crate) async fn tell(engine: &Postgres, db: &impl Sql, notices: Vec<Event>) -> Result<()> {
    if notices.is_empty() {
        return Ok(());
    }
    let sets: Vec<&[Event]> = notices.iter().map(std::slice::from_ref).collect();
    let free = check_sets(engine, db, &sets).await?;
    // A notice whose id is taken was reported before with another text: once is enough.
    let new = notices.iter().zip(free).filter(|(_, free)| free.is_ok());
    let new: Vec<&Event> = new.map(|(notice, _)| notice).collect();
    append_in(engine, db, &new).await.map(drop)
}

/// Records why groups skipped events.
pub(crate) async fn write_skips(
    db: &impl Sql,
    skips: &[(i64, u64, String)],
    now: i64,
) -> Result<()> {
    if skips.is_empty() {
        return Ok(());
    }
    let groups: Vec<i64> = skips.iter().map(|(group, ..)| *group).collect();
    let seqs: Vec<i64> = skips.iter().map(|(_, seq, _)| to_sql(*seq)).collect();
    let reasons: Vec<String> = skips.iter().map(|(.., reason)| storable(reason)).collect();
    let sql = "INSERT INTO everbus.skips (group_id, seq, reason, at)
               SELECT x.group_id, x.seq, x.reason, $4
               FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS x (group_id, seq, reason)
               ON CONFLICT (group_id, seq) DO UPDATE SET reason = excluded.reason, at = excluded.at";
    db.execute("recording skips", sql, &[&groups, &seqs, &reasons, &now])
        .await
        .map(drop)
}
