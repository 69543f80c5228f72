//! One transaction of settlements: first inbox records, effects and follow-ups, then the verdicts.

use std::collections::HashSet;

use everbus_core::{Event, Lease, Result, Settlement, Timestamp, Verdict};

use super::changes::{Changes, decide};
use super::held::Held;
use super::{lost, parts, runs_effect};
use crate::Postgres;
use crate::append::{append_in, check_sets, conflict};
use crate::bury::tell;
use crate::effect;
use crate::pool::{Sql as _, Tx};
use crate::rows::{get, get_seq, to_sql};

/// Applies settlements of leases that last beyond `held_after`. An error undoes all of them. Returns whether
/// events were appended.
pub(super) async fn apply(
    engine: &Postgres,
    tx: &Tx<'_>,
    settlements: &[&Settlement],
    now: Timestamp,
    held_after: i64,
) -> Result<(Vec<Result<()>>, bool)> {
    let leases: Vec<Lease> = settlements.iter().map(|s| s.lease.clone()).collect();
    let owner = engine.session().owner();
    // The leases are not locked while an effect runs, because others need the same claims for their acks.
    let effect_first = settlements.iter().any(|s| runs_effect(s));
    let mut held = if effect_first {
        Held::look(tx, &leases, owner, held_after).await?
    } else {
        Held::read(tx, &leases, owner, held_after).await?
    };
    let mut seen = HashSet::new();
    let mut answers: Vec<Result<()>> = Vec::with_capacity(settlements.len());
    for settlement in settlements {
        let lease = &settlement.lease;
        let first = seen.insert((lease.words(), lease.position().place()));
        let effect = settlement
            .effect
            .as_ref()
            .filter(|_| settlement.verdict == Verdict::Ack);
        answers.push(match held.place(lease) {
            Some(_) if first => effect.map_or(Ok(()), effect::check),
            _ => Err(lost(lease)),
        });
    }
    let mut events = follow(engine, tx, settlements, &mut answers, now).await?;
    if effect_first {
        held = Held::read(tx, &leases, owner, held_after).await?;
        let mut wanted = settlements.iter().zip(&answers);
        let gone = wanted.find(|(s, answer)| answer.is_ok() && held.place(&s.lease).is_none());
        if let Some((settlement, _)) = gone {
            // Undoes the effect.
            return Err(lost(&settlement.lease));
        }
    }
    let mut changes = Changes::default();
    for (settlement, answer) in settlements.iter().zip(&answers) {
        if answer.is_ok() {
            decide(&mut held, &mut changes, settlement, now);
        }
    }
    held.write(tx).await?;
    let notices = changes.write(engine, tx, now).await?;
    let appended = !events.is_empty() || !notices.is_empty();
    if !events.is_empty() {
        let new: Vec<&Event> = events.iter().collect();
        append_in(engine, tx, &new).await.map_err(conflict)?;
        events.clear();
    }
    tell(engine, tx, notices).await?;
    Ok((answers, appended))
}

/// Does what belongs to acks: inbox records, effects, and the check of follow-up events. Returns the events to append.
/// An event that is already in the inbox is acked without its effect and follow-ups.
async fn follow(
    engine: &Postgres,
    tx: &Tx<'_>,
    settlements: &[&Settlement],
    answers: &mut [Result<()>],
    now: Timestamp,
) -> Result<Vec<Event>> {
    let records = |s: &Settlement| s.inbox && s.verdict == Verdict::Ack;
    let brings = |s: &Settlement| !s.follow_ups.is_empty() || s.effect.is_some();
    let asked = settlements.iter().zip(&*answers);
    let asked: Vec<&Settlement> = asked
        .filter(|(s, answer)| answer.is_ok() && records(s) && brings(s))
        .map(|(s, _)| *s)
        .collect();
    let again = already_handled(tx, &asked).await?;
    let is_again = |s: &Settlement| {
        let place = (parts(&s.lease).0, s.lease.position().place());
        records(s) && again.contains(&place)
    };
    let sets: Vec<&[Event]> = settlements
        .iter()
        .zip(&*answers)
        .map(|(s, answer)| {
            let counts = answer.is_ok() && !is_again(s);
            if counts { s.follow_ups.as_slice() } else { &[] }
        })
        .collect();
    let free = check_sets(engine, tx, &sets).await?;
    let mut events = Vec::new();
    for ((settlement, answer), free) in settlements.iter().zip(answers.iter_mut()).zip(free) {
        if answer.is_err() {
            continue;
        }
        if let Err(refused) = free {
            *answer = Err(refused);
            continue;
        }
        if is_again(settlement) {
            continue;
        }
        events.extend(settlement.follow_ups.iter().cloned());
        if let Some(effect) = &settlement.effect
            && settlement.verdict == Verdict::Ack
        {
            let more = effect::run(tx, effect).await?;
            let set: &[Event] = &more;
            check_sets(engine, tx, &[set])
                .await?
                .pop()
                .unwrap_or(Ok(()))?;
            events.extend(more);
        }
    }
    let noted = settlements.iter().zip(&*answers);
    let noted: Vec<&Settlement> = noted
        .filter(|(s, answer)| answer.is_ok() && records(s))
        .map(|(s, _)| *s)
        .collect();
    note_handled(tx, &noted, now).await?;
    Ok(events)
}

fn places(settlements: &[&Settlement]) -> (Vec<i64>, Vec<i64>) {
    let leases = settlements.iter().map(|s| &s.lease);
    leases
        .map(|lease| (parts(lease).0, to_sql(lease.position().place())))
        .unzip()
}

/// Which of these events their groups have handled before.
async fn already_handled(tx: &Tx<'_>, asked: &[&Settlement]) -> Result<HashSet<(i64, u64)>> {
    if asked.is_empty() {
        return Ok(HashSet::new());
    }
    let (groups, seqs) = places(asked);
    let sql = "SELECT x.group_id, x.seq FROM unnest($1::bigint[], $2::bigint[]) AS x (group_id, seq)
               JOIN everbus.log l ON l.seq = x.seq
               JOIN everbus.inbox i ON i.group_id = x.group_id AND i.id = l.id AND i.tenant = l.tenant";
    let rows = tx.query("asking the inbox", sql, &[&groups, &seqs]).await?;
    rows.iter()
        .map(|row| Ok((get(row, 0)?, get_seq(row, 1)?)))
        .collect()
}

async fn note_handled(tx: &Tx<'_>, noted: &[&Settlement], now: Timestamp) -> Result<()> {
    if noted.is_empty() {
        return Ok(());
    }
    let (groups, seqs) = places(noted);
    let sql = "INSERT INTO everbus.inbox (group_id, id, tenant, at)
               SELECT x.group_id, l.id, l.tenant, $3
               FROM unnest($1::bigint[], $2::bigint[]) AS x (group_id, seq)
               JOIN everbus.log l ON l.seq = x.seq ON CONFLICT DO NOTHING";
    let at = now.as_micros();
    tx.execute("writing the inbox", sql, &[&groups, &seqs, &at])
        .await
        .map(drop)
}
