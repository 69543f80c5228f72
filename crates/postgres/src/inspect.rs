//! The state and backlog of every group, and what holds the log back.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use everbus_core::{Cursor, GroupInfo, Lag, Result, Timestamp};

use crate::Postgres;
use crate::groups::{self, Group, caught_up};
use crate::pool::{Conn, Params, Sql as _};
use crate::rows::{LEASED, UNHANDLED, get, get_seq, seq_from, to_sql};

/// The backlog of a group by type number.
type Types = HashMap<i32, Lag>;

impl Postgres {
    pub(crate) async fn inspect_groups(&self) -> Result<Vec<GroupInfo>> {
        self.end_leases().await?;
        let conn = self.conn().await?;
        let gone = self.gone_owners(&conn).await?;
        let mut groups = groups::all(&*conn).await?;
        // An ephemeral group ends with its owner, even before it is removed.
        groups.retain(|group| group.owner.is_none_or(|owner| !gone.contains(&owner)));
        let end = self.horizon.ask(&*conn).await?;
        self.types.learn_all(&*conn).await?;
        let held_back = if end.newest > end.decided {
            holder(&conn).await?
        } else {
            None
        };
        let now = self.now();
        let mut infos = Vec::with_capacity(groups.len());
        for group in groups {
            let mut info = self.info(&conn, &group, end.decided, now).await?;
            info.held_back.clone_from(&held_back);
            infos.push(info);
        }
        Ok(infos)
    }

    /// The owners of ephemeral groups that are gone.
    async fn gone_owners(&self, conn: &Conn) -> Result<Vec<i64>> {
        let sql = "SELECT DISTINCT g.owner FROM everbus.groups g WHERE g.owner IS NOT NULL
                   AND (g.owner IN (SELECT everbus.unlocked_owners())
                     OR NOT EXISTS (SELECT 1 FROM everbus.owners o WHERE o.id = g.owner))";
        let rows = conn.query("looking for dead owners", sql, &[]).await?;
        let own = self.session().owner();
        let gone = rows.iter().map(|row| get(row, 0));
        let gone: Vec<i64> = gone.collect::<Result<_>>()?;
        Ok(gone.into_iter().filter(|owner| *owner != own).collect())
    }

    async fn info(
        &self,
        conn: &Conn,
        group: &Group,
        decided: u64,
        now: Timestamp,
    ) -> Result<GroupInfo> {
        let mut types = self.beyond(conn, group).await?;
        let mut add = |id: i32, lag: Lag| types.entry(id).or_default().add(&lag);
        let doing = "counting the deliveries";
        let sql = "SELECT d.type, d.state, count(*), min(l.received_at) FROM everbus.deliveries d
                   JOIN everbus.log l ON l.seq = d.seq WHERE d.group_id = $1 GROUP BY 1, 2";
        for row in conn.query(doing, sql, &[&group.id]).await? {
            let (state, count): (i16, u64) = (get(&row, 1)?, get_seq(&row, 2)?);
            let mut lag = Lag::new();
            lag.oldest = Some(Timestamp::from_micros(get(&row, 3)?));
            match state {
                LEASED => lag.in_flight = count,
                _ => lag.waiting = count,
            }
            if state == UNHANDLED {
                lag.unhandled = count;
            }
            add(get(&row, 0)?, lag);
        }
        // The ORDER BY makes the planner begin with the claims. Without it, and with many dead rows in `claims`, it
        // expects many claims, and looks for claims of each event of the log.
        let sql = "SELECT l.type, count(*), min(l.received_at) FROM everbus.claims c
                   CROSS JOIN LATERAL (SELECT l.type, l.received_at FROM everbus.log l
                     WHERE l.seq BETWEEN c.lo AND c.hi AND NOT c.done @> l.seq ORDER BY l.seq) l
                   WHERE c.group_id = $1 GROUP BY 1";
        for row in conn.query("counting the claims", sql, &[&group.id]).await? {
            let mut lag = Lag::new();
            lag.in_flight = get_seq(&row, 1)?;
            lag.oldest = Some(Timestamp::from_micros(get(&row, 2)?));
            add(get(&row, 0)?, lag);
        }
        let sql = "SELECT type, count(*) FROM everbus.dead_letters
                   WHERE group_id = $1 AND retried_at IS NULL GROUP BY 1";
        for row in conn
            .query("counting the dead letters", sql, &[&group.id])
            .await?
        {
            let mut lag = Lag::new();
            lag.dead_letters = get_seq(&row, 1)?;
            add(get(&row, 0)?, lag);
        }
        let unknown: Arc<str> = "".into();
        let mut by_name: BTreeMap<Arc<str>, Lag> = BTreeMap::new();
        for (id, lag) in types {
            let name = self.types.name(id).unwrap_or_else(|| unknown.clone());
            by_name.entry(name).or_default().add(&lag);
        }
        let sql = "SELECT active_at FROM everbus.groups WHERE id = $1";
        let row = conn.first("reading a group", sql, &[&group.id]).await?;
        let active_at = row.map_or(Ok(0), |row| get::<i64>(&row, 0))?;
        let mut info = GroupInfo::new(group.name.clone(), Timestamp::from_micros(active_at));
        info.ordered = group.ordered;
        info.ephemeral = group.owner.is_some();
        info.patterns = group
            .patterns
            .iter()
            .map(|p| p.as_str().to_owned())
            .collect();
        info.subscriptions = groups::subscriptions(conn, group).await?;
        let position = caught_up(conn, &self.types, group, decided).await?;
        info.position = Cursor::seq(position);
        Ok(info.with_types(by_name, now))
    }

    /// Matching events after the cursor of a group, by type.
    async fn beyond(&self, conn: &Conn, group: &Group) -> Result<Types> {
        let unwanted = group.unwanted(&self.types);
        let sql = "SELECT l.type, count(*), min(l.received_at) FROM everbus.log l
                   WHERE l.seq > $1 AND NOT (l.type = ANY ($2))
                     AND CASE WHEN l.address IS NULL THEN true ELSE l.address = $3 OR $4 END
                     AND ($1 >= $5 OR NOT EXISTS
                       (SELECT 1 FROM everbus.skips s WHERE s.group_id = $6 AND s.seq = l.seq))
                     AND NOT EXISTS
                       (SELECT 1 FROM everbus.deliveries d WHERE d.group_id = $6 AND d.seq = l.seq)
                   GROUP BY 1";
        let (cursor, dropped) = (to_sql(group.cursor), to_sql(group.dropped_to));
        let values: Params<'_> = &[
            &cursor,
            &unwanted,
            &group.name.as_str(),
            &group.is_archive(),
            &dropped,
            &group.id,
        ];
        let rows = conn.query("counting what waits", sql, values).await?;
        let mut types = Types::new();
        for row in &rows {
            let id: i32 = get(row, 0)?;
            // Leaves out a type that was added after the names were read.
            if !self.types.name(id).is_some_and(|name| group.wants(&name)) {
                continue;
            }
            let mut lag = Lag::new();
            lag.behind = seq_from(get(row, 1)?);
            lag.oldest = Some(Timestamp::from_micros(get(row, 2)?));
            types.insert(id, lag);
        }
        Ok(types)
    }
}

/// The transaction that readers of the log wait for: the oldest that writes to it.
async fn holder(conn: &Conn) -> Result<Option<String>> {
    let sql = "SELECT l.pid, coalesce(a.usename, p.owner)::text, coalesce(a.application_name, '')::text,
                 extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8,
                 coalesce(a.state, 'prepared')::text, left(coalesce(a.query, p.gid), 200)::text
               FROM pg_catalog.pg_locks l
               LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
               LEFT JOIN pg_catalog.pg_locks x ON l.pid IS NULL AND x.pid IS NULL
                 AND x.locktype = 'transactionid' AND x.virtualtransaction = l.virtualtransaction
               LEFT JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = x.transactionid
               WHERE l.locktype = 'relation' AND l.relation = 'everbus.log'::regclass
                 AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d
                   WHERE d.datname = current_database())
                 AND l.mode = 'RowExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
               ORDER BY coalesce(a.xact_start, p.prepared) LIMIT 1";
    let Some(row) = conn
        .first("looking what holds the log back", sql, &[])
        .await?
    else {
        return Ok(None);
    };
    let pid: Option<i32> = get(&row, 0)?;
    let text = |column: usize| -> Result<String> {
        Ok(get::<Option<String>>(&row, column)?.unwrap_or_default())
    };
    let (user, program, state, query) = (text(1)?, text(2)?, text(4)?, text(5)?);
    let age: f64 = get::<Option<f64>>(&row, 3)?.unwrap_or(0.0);
    let who = match pid {
        Some(pid) => format!("process {pid} of {user} ({program}), {state}"),
        None => format!("a prepared transaction of {user}"),
    };
    Ok(Some(format!(
        "a transaction that writes to the log has not ended for {age:.1} s: {who}: {query}"
    )))
}
