//! The usual settlement: acks of first attempts without anything else, in one
//! statement.

use std::collections::{BTreeMap, HashSet};

use everbus_core::{Code, Result, Settlement, Verdict};

use super::parts;
use crate::Postgres;
use crate::pool::{Conn, Params, Role};
use crate::ranges::Ranges;
use crate::rows::get;

/// Whether a settlement changes nothing but its claim.
fn is_plain(settlement: &Settlement) -> bool {
    settlement.verdict == Verdict::Ack
        && !settlement.inbox
        && settlement.effect.is_none()
        && settlement.follow_ups.is_empty()
}

/// Acks the rest of a claim, which is as the function `everbus.ack` does it. A statement of its own takes the server two
/// thirds of the time of the function.
const FINISH: &str = "DELETE FROM everbus.claims x
  WHERE x.token = $1 AND x.group_id = $2 AND x.until > $4 AND x.owner = $5
    AND int8range(x.lo, x.hi, '[]') @> $3::text::int8multirange AND NOT x.done && $3::text::int8multirange
    AND x.done + $3::text::int8multirange @> int8range(x.lo, x.hi, '[]')
  RETURNING ARRAY[x.token]";

impl Postgres {
    /// Writes the plain acks whose claims are held as expected. Returns for each settlement whether it was written. For
    /// the others nothing was changed.
    pub(super) async fn write_acks(&self, settlements: &[&Settlement]) -> Result<Vec<bool>> {
        let mut claims: BTreeMap<i64, (i64, Ranges)> = BTreeMap::new();
        // A lease that comes twice must be refused the second time, which only `apply` does.
        let mut twice: HashSet<i64> = HashSet::new();
        for settlement in settlements.iter().filter(|s| is_plain(s)) {
            let (group, token) = parts(&settlement.lease);
            let claim = claims.entry(token).or_insert((group, Ranges::default()));
            if !claim.1.add(settlement.lease.position().place()) || claim.0 != group {
                twice.insert(token);
            }
        }
        claims.retain(|token, _| !twice.contains(token));
        if claims.is_empty() {
            return Ok(vec![false; settlements.len()]);
        }
        let written = self.write_claims(&claims).await?;
        let written: HashSet<i64> = written.into_iter().collect();
        let is_written = |s: &&Settlement| is_plain(s) && written.contains(&parts(&s.lease).1);
        Ok(settlements.iter().map(is_written).collect())
    }

    /// Writes the acks of claims. Returns the tokens of those that were written.
    async fn write_claims(&self, claims: &BTreeMap<i64, (i64, Ranges)>) -> Result<Vec<i64>> {
        let conn = self.pool.get_for(Role::Ack).await?;
        let (at, owner) = (self.micros(), self.session().owner());
        if let (Some((token, (group, acked))), 1) = (claims.first_key_value(), claims.len())
            && self.seats.held_of(*token) as u64 == acked.count()
        {
            let text = acked.to_string();
            let written = ask(&conn, FINISH, &[token, group, &text, &at, &owner]).await?;
            if !written.is_empty() {
                return Ok(written);
            }
        }
        let tokens: Vec<i64> = claims.keys().copied().collect();
        let groups: Vec<i64> = claims.values().map(|(group, _)| *group).collect();
        let texts = claims.values().map(|(_, acked)| acked.to_string());
        let acked: Vec<String> = texts.collect();
        let sql = "SELECT everbus.ack($1, $2, $3, $4, $5)";
        ask(&conn, sql, &[&tokens, &groups, &acked, &at, &owner]).await
    }
}

/// Runs a statement that acks. Returns the tokens of the claims whose acks were written.
async fn ask(conn: &Conn, sql: &str, values: Params<'_>) -> Result<Vec<i64>> {
    match conn.query_planned("settling", sql, values).await {
        Ok(rows) => rows.first().map_or(Ok(Vec::new()), |row| get(row, 0)),
        // A conflict with another transaction.
        Err(error) if error.code() == Code::Busy => Ok(Vec::new()),
        // Without an answer it is unknown whether the statement was committed.
        Err(error) if error.code() == Code::Unavailable => Err(error.with_unknown_outcome()),
        Err(error) => Err(error),
    }
}
