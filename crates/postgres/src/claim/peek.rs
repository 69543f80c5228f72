//! A look without a lock: whether there is something to hand out.

use everbus_core::{Pattern, Result};

use super::rows::FIRST_OF_KEY;
use super::{Asking, LAZY};
use crate::Postgres;
use crate::groups::{self, Group};
use crate::pool::{Params, Sql as _};
use crate::rows::{get, get_seq};

/// What a look without a lock has seen.
pub(super) struct Peek {
    pub(super) work: bool,
    pub(super) next: Option<i64>,
}

impl Postgres {
    /// Looks whether there is something to hand out.
    pub(super) async fn peek(
        &self,
        asking: &Asking,
        patterns: &[Pattern],
        now: i64,
    ) -> Result<Peek> {
        let conn = self.conn().await?;
        loop {
            let group = self.groups.get(&*conn, asking.group).await?;
            if let Some(peek) = self.peek_as(&conn, &group, asking, patterns, now).await? {
                return Ok(peek);
            }
        }
    }

    /// Looks with the cached patterns of a group. `None`: the group has other patterns by now.
    async fn peek_as(
        &self,
        conn: &crate::pool::Conn,
        group: &Group,
        asking: &Asking,
        patterns: &[Pattern],
        now: i64,
    ) -> Result<Option<Peek>> {
        let unwanted = group.unwanted(&self.types);
        // In an ordered group a row may be handed out only if it is the first of its key.
        let sql = format!(
            "SELECT g.cursor, s.newest,
               (SELECT min(l.seq) FROM (SELECT l.seq FROM everbus.log l WHERE l.seq > g.cursor
                  AND NOT (l.type = ANY ($3)) AND CASE WHEN l.address IS NULL THEN true ELSE l.address = g.name OR $4 END
                  ORDER BY l.seq LIMIT 1) l),
               EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 0
                  AND d.due <= $2 AND NOT d.suspect AND {FIRST_OF_KEY}),
               EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 0
                  AND d.due <= $2 AND d.suspect AND {FIRST_OF_KEY})
                 AND NOT EXISTS (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 1
                  AND d.suspect AND d.owner = $5),
               (SELECT min(d.due) FROM everbus.deliveries d
                  WHERE d.group_id = g.id AND d.state = 0 AND d.due > $2),
               (SELECT min(d.due) FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 3),
               least((SELECT min(c.until) FROM everbus.claims c WHERE c.group_id = g.id),
                 (SELECT min(d.until) FROM everbus.deliveries d WHERE d.group_id = g.id AND d.state = 1)),
               ARRAY (SELECT t.id FROM everbus.types t WHERE EXISTS (SELECT 1 FROM everbus.deliveries d
                  WHERE d.group_id = g.id AND d.state = 3 AND d.type = t.id AND {FIRST_OF_KEY})),
               ARRAY (SELECT s.event_type FROM everbus.subscriptions s
                  WHERE s.group_id = g.id ORDER BY s.name)
             FROM everbus.groups g,
               (SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS newest FROM everbus.log_seq) s
             WHERE g.id = $1"
        );
        let values: Params<'_> = &[
            &asking.group,
            &now,
            &unwanted,
            &group.is_archive(),
            &asking.owner,
        ];
        let row = conn.first("looking for events", &sql, values).await?;
        let row = row.ok_or_else(groups::removed)?;
        let (cursor, newest) = (get_seq(&row, 0)?, get_seq(&row, 1)?);
        let first_new: Option<i64> = get(&row, 2)?;
        let (due, suspect): (bool, bool) = (get(&row, 3)?, get(&row, 4)?);
        let next_due: Option<i64> = get(&row, 5)?;
        let (unhandled, lease_end): (Option<i64>, Option<i64>) = (get(&row, 6)?, get(&row, 7)?);
        let texts: Vec<&str> = get(&row, 9)?;
        if !texts
            .iter()
            .copied()
            .eq(group.patterns.iter().map(Pattern::as_str))
        {
            self.groups.forget(group.id);
            return Ok(None);
        }
        let set_aside: Vec<i32> = get(&row, 8)?;
        self.types.learn(conn, set_aside.iter().copied()).await?;
        let mut names = set_aside.iter().filter_map(|id| self.types.name(*id));
        let is_over = |at: Option<i64>| at.is_some_and(|at| at <= now);
        let work = first_new.is_some()
            || newest > cursor + LAZY
            || due
            || suspect
            || is_over(unhandled)
            || is_over(lease_end)
            || names.any(|name| patterns.iter().any(|p| p.matches(&name)));
        let next = [next_due, unhandled, lease_end].into_iter().flatten().min();
        Ok(Some(Peek { work, next }))
    }
}
