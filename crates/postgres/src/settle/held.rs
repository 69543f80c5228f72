//! The claims and rows of leases that are held.

use std::collections::{BTreeMap, HashMap};

use everbus_core::{Lease, Result};

use super::parts;
use crate::pool::{Sql as _, Tx};
use crate::ranges::Ranges;
use crate::rows::{get, get_seq, to_sql};

/// Where the event of a lease is.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// In the claim with this token.
    Claim(i64),
    /// In a row of its own: group and position.
    Row(i64, u64),
}

/// A claim as stored.
pub(crate) struct Claim {
    pub(crate) group: i64,
    pub(crate) lo: u64,
    pub(crate) hi: u64,
    pub(crate) done: Ranges,
    pub(super) changed: bool,
}

/// A leased row.
pub(super) struct LeasedRow {
    pub(super) attempt: u32,
    pub(super) failures: Option<String>,
    pub(super) was_dead: bool,
}

/// The claims and rows of leases that are held, locked until the end of the transaction.
pub(crate) struct Held {
    pub(super) claims: BTreeMap<i64, Claim>,
    pub(super) rows: HashMap<(i64, u64), (i64, LeasedRow)>,
}

impl Held {
    /// Reads the leases of this owner that last beyond `now`. The leases of other processes cannot be settled here.
    pub(crate) async fn read(tx: &Tx<'_>, leases: &[Lease], owner: i64, now: i64) -> Result<Self> {
        Self::read_with(tx, leases, owner, now, true).await
    }

    /// As [`read`](Self::read), without locks: a lease may be lost a moment later.
    pub(super) async fn look(tx: &Tx<'_>, leases: &[Lease], owner: i64, now: i64) -> Result<Self> {
        Self::read_with(tx, leases, owner, now, false).await
    }

    async fn read_with(
        tx: &Tx<'_>,
        leases: &[Lease],
        owner: i64,
        now: i64,
        lock: bool,
    ) -> Result<Self> {
        let (lock_claims, lock_rows) = if lock {
            ("FOR UPDATE", "FOR UPDATE OF d")
        } else {
            ("", "")
        };
        let doing = "reading leases";
        let mut tokens: Vec<i64> = leases.iter().map(|lease| parts(lease).1).collect();
        tokens.sort_unstable();
        tokens.dedup();
        let sql = format!(
            "SELECT token, group_id, lo, hi, done::text FROM everbus.claims
                   WHERE token = ANY ($1) AND until > $2 AND owner = $3 ORDER BY token {lock_claims}"
        );
        let mut claims = BTreeMap::new();
        for row in tx.query(doing, &sql, &[&tokens, &now, &owner]).await? {
            let claim = Claim {
                group: get(&row, 1)?,
                lo: get_seq(&row, 2)?,
                hi: get_seq(&row, 3)?,
                done: Ranges::parse(get(&row, 4)?)?,
                changed: false,
            };
            claims.insert(get(&row, 0)?, claim);
        }
        let mut held = Self {
            claims,
            rows: HashMap::new(),
        };
        // Rows are read after the claims: an event may move from its claim to a row, never back.
        let rest = leases.iter().filter(|lease| held.place(lease).is_none());
        let (mut groups, mut seqs, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        for lease in rest {
            let (group, token) = parts(lease);
            groups.push(group);
            seqs.push(to_sql(lease.position().place()));
            tokens.push(token);
        }
        if groups.is_empty() {
            return Ok(held);
        }
        let sql = format!(
            "SELECT d.group_id, d.seq, d.token, d.attempt, d.failures,
                     EXISTS (SELECT 1 FROM everbus.dead_letters x
                       WHERE x.seq = d.seq AND x.group_id = d.group_id AND x.retried_at IS NOT NULL)
                   FROM everbus.deliveries d
                   JOIN unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS x (group_id, seq, token)
                     ON d.group_id = x.group_id AND d.seq = x.seq AND d.token = x.token
                   WHERE d.state = 1 AND d.until > $4 AND d.owner = $5
                   ORDER BY d.group_id, d.seq {lock_rows}"
        );
        for row in tx
            .query(doing, &sql, &[&groups, &seqs, &tokens, &now, &owner])
            .await?
        {
            let leased = LeasedRow {
                attempt: u32::try_from(get::<i32>(&row, 3)?).unwrap_or(0),
                failures: get(&row, 4)?,
                was_dead: get(&row, 5)?,
            };
            held.rows
                .insert((get(&row, 0)?, get_seq(&row, 1)?), (get(&row, 2)?, leased));
        }
        Ok(held)
    }

    /// Where the event of a lease is, if the lease is held.
    pub(crate) fn place(&self, lease: &Lease) -> Option<Place> {
        let ((group, token), seq) = (parts(lease), lease.position().place());
        if let Some(claim) = self.claims.get(&token)
            && claim.group == group
            && (claim.lo..=claim.hi).contains(&seq)
            && !claim.done.contains(seq)
        {
            return Some(Place::Claim(token));
        }
        let (held, _) = self.rows.get(&(group, seq))?;
        (*held == token).then_some(Place::Row(group, seq))
    }

    pub(crate) fn claim(&self, token: i64) -> Option<&Claim> {
        self.claims.get(&token)
    }

    /// Writes the claims that changed, and deletes those that are finished.
    pub(super) async fn write(&self, tx: &Tx<'_>) -> Result<()> {
        let doing = "settling";
        let changed = self.claims.iter().filter(|(_, claim)| claim.changed);
        let (finished, open): (Vec<_>, Vec<_>) =
            changed.partition(|(_, claim)| claim.done.gaps(claim.lo, claim.hi).is_empty());
        if !finished.is_empty() {
            let tokens: Vec<i64> = finished.iter().map(|(token, _)| **token).collect();
            let sql = "DELETE FROM everbus.claims WHERE token = ANY ($1)";
            tx.execute(doing, sql, &[&tokens]).await?;
        }
        if !open.is_empty() {
            let tokens: Vec<i64> = open.iter().map(|(token, _)| **token).collect();
            let done: Vec<String> = open
                .iter()
                .map(|(_, claim)| claim.done.to_string())
                .collect();
            let sql = "UPDATE everbus.claims c SET done = x.done::int8multirange
                       FROM unnest($1::bigint[], $2::text[]) AS x (token, done) WHERE c.token = x.token";
            tx.execute(doing, sql, &[&tokens, &done]).await?;
        }
        Ok(())
    }
}
