//! The usual settlement: acks of first attempts without anything else, in one call of the function `everbus.ack`.

use std::collections::{BTreeMap, HashSet};

use everbus_core::{Code, Result, Settlement, Verdict};

use super::parts;
use crate::Postgres;
use crate::pool::{Params, Role};
use crate::ranges::Ranges;
use crate::rows::get;

/// Whether a settlement changes nothing but its claim.
fn is_plain(settlement: &Settlement) -> bool {
    settlement.verdict == Verdict::Ack
        && !settlement.inbox
        && settlement.effect.is_none()
        && settlement.follow_ups.is_empty()
}

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
        let tokens: Vec<i64> = claims.keys().copied().collect();
        let groups: Vec<i64> = claims.values().map(|(group, _)| *group).collect();
        let acked: Vec<String> = claims
            .values()
            .map(|(_, acked)| acked.to_string())
            .collect();
        let (at, owner) = (self.micros(), self.session().owner());
        let sql = "SELECT everbus.ack($1, $2, $3, $4, $5)";
        let conn = self.pool.get_for(Role::Ack).await?;
        let values: Params<'_> = &[&tokens, &groups, &acked, &at, &owner];
        let written: Vec<i64> = match conn.query_planned("settling", sql, values).await {
            Ok(rows) => rows.first().map_or(Ok(Vec::new()), |row| get(row, 0))?,
            // A conflict with another transaction.
            Err(error) if error.code() == Code::Busy => Vec::new(),
            // Without an answer it is unknown whether the statement was committed.
            Err(error) if error.code() == Code::Unavailable => {
                return Err(error.with_unknown_outcome());
            }
            Err(error) => return Err(error),
        };
        let written: HashSet<i64> = written.into_iter().collect();
        let is_written = |s: &&Settlement| is_plain(s) && written.contains(&parts(&s.lease).1);
        Ok(settlements.iter().map(is_written).collect())
    }
}
