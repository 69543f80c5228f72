//! Creating, changing and removing groups and subscriptions.

use std::time::Duration;

use everbus_core::{
    Code, Cursor, Error, EventId, GroupName, GroupSpec, Pattern, Result, SubscriptionInfo,
    SubscriptionSpec, Timestamp, UNSUBSCRIBED, no_group,
};

use crate::Postgres;
use crate::bury::write_skips;
use crate::groups::{self, Group, caught_up};
use crate::horizon::End;
use crate::outcomes;
use crate::pool::{Params, Sql, Tx, transaction};
use crate::rows::{get, get_seq, read_failures, to_sql};

/// How long the declaration of a group waits for writers that have not ended, so that it begins after
/// everything that was published before.
const PATIENCE: Duration = Duration::from_secs(2);

impl Postgres {
    /// Creates a group if it is new, and adds subscriptions.
    pub(crate) async fn declare_group(&self, spec: GroupSpec) -> Result<Vec<SubscriptionInfo>> {
        self.check_open()?;
        let owner = if spec.ephemeral {
            if !self.has_session() {
                return Err(Error::new(
                    Code::Unsupported,
                    "an ephemeral group needs a connection of its own",
                )
                .hint(
                    "name the server behind the pooler in the URL: direct_url=postgres%3A%2F%2F…",
                ));
            }
            let owner = self.become_owner().await?;
            // A dead process may have left a group with this name.
            self.recover().await?;
            Some(owner)
        } else {
            None
        };
        self.settle_horizon().await?;
        let now = self.now();
        let declared = transaction!(self.pool, "declaring a group", |tx| {
            declare(self, tx, &spec, owner, now).await
        })?;
        self.bell.ring();
        Ok(declared)
    }

    /// Waits until the end of the log is decided, up to [`PATIENCE`].
    async fn settle_horizon(&self) -> Result<End> {
        let began = tokio::time::Instant::now();
        loop {
            let end = self.horizon.ask(&*self.conn().await?).await?;
            if end.decided >= end.newest || began.elapsed() >= PATIENCE {
                return Ok(end);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Removes a subscription. Events that the group already has stay, unless they wait for a handler.
    pub(crate) async fn retract_subscription(&self, subscription: EventId) -> Result<()> {
        self.check_open()?;
        let now = self.now();
        transaction!(self.pool, "unsubscribing", |tx| {
            let doing = "unsubscribing";
            let sql = "SELECT group_id FROM everbus.subscriptions WHERE id = $1";
            let id = subscription.as_uuid();
            let unknown = || {
                Error::new(
                    Code::SubscriptionNotFound,
                    format!("there is no subscription {subscription}"),
                )
                .hint("subscriptions are named by the id that subscribe returned")
            };
            let row = tx.first(doing, sql, &[&id]).await?.ok_or_else(unknown)?;
            let group: i64 = get(&row, 0)?;
            groups::lock(tx, group).await?.ok_or_else(unknown)?;
            let sql = "DELETE FROM everbus.subscriptions WHERE id = $1";
            if tx.execute(doing, sql, &[&id]).await? == 0 {
                return Err(unknown());
            }
            if let Some(locked) = groups::lock(tx, group).await? {
                skip_unwanted(self, tx, &locked.group, now).await?;
            }
            Ok(())
        })?;
        self.bell.ring();
        Ok(())
    }

    pub(crate) async fn remove_group_named(&self, name: &GroupName) -> Result<()> {
        self.check_open()?;
        transaction!(self.pool, "removing a group", |tx| {
            let sql = "SELECT id FROM everbus.groups WHERE name = $1 FOR UPDATE";
            let row = tx.first("removing a group", sql, &[&name.as_str()]).await?;
            let row = row.ok_or_else(|| no_group(name))?;
            remove_numbered(tx, get(&row, 0)?).await
        })?;
        self.bell.ring();
        Ok(())
    }
}

async fn declare(
    engine: &Postgres,
    tx: &Tx<'_>,
    spec: &GroupSpec,
    owner: Option<i64>,
    now: Timestamp,
) -> Result<Vec<SubscriptionInfo>> {
    let known = match groups::find(tx, &spec.name).await? {
        Some(group) => groups::lock(tx, group.id).await?.map(|locked| locked.group),
        None => None,
    };
    let is_new = known.is_none();
    let mut group = match known {
        Some(group) => {
            spec.check_known(group.ordered, group.owner == owner)?;
            group
        }
        None => create(engine, tx, spec, owner, now).await?,
    };
    let changes = !is_new
        && spec
            .subscriptions
            .iter()
            .any(|s| !group.patterns.contains(&s.pattern));
    if changes {
        // New patterns apply to later events only, so the cursor first passes events that the group did not want.
        let end = engine.horizon.ask(tx).await?;
        group.cursor = caught_up(tx, &engine.types, &group, end.decided).await?;
        let sql = "UPDATE everbus.groups SET cursor = $2 WHERE id = $1 AND cursor < $2";
        tx.execute(
            "declaring a group",
            sql,
            &[&group.id, &to_sql(group.cursor)],
        )
        .await?;
    }
    let mut all = Vec::with_capacity(spec.subscriptions.len());
    for wanted in &spec.subscriptions {
        all.push(subscribe(tx, &group, wanted, now).await?);
    }
    let others = groups::subscriptions(tx, &group).await?.into_iter();
    all.extend(others.filter(|other| spec.subscriptions.iter().all(|s| s.name != other.name)));
    group.patterns = all.iter().map(|s| s.pattern.clone()).collect();
    // A subscription may have become narrower.
    skip_unwanted(engine, tx, &group, now).await?;
    engine.groups.forget(group.id);
    Ok(all)
}

async fn create(
    engine: &Postgres,
    tx: &Tx<'_>,
    spec: &GroupSpec,
    owner: Option<i64>,
    now: Timestamp,
) -> Result<Group> {
    spec.check_new()?;
    let patterns = spec.subscriptions.iter().map(|s| s.pattern.clone());
    let patterns: Vec<Pattern> = patterns.collect();
    let end = engine.horizon.ask(tx).await?;
    let cursor = engine
        .resolve_start(tx, spec.start_from, &patterns, end.decided)
        .await?;
    let sql = "INSERT INTO everbus.groups (name, ordered, cursor, declared_at, created_at, active_at, owner)
               VALUES ($1, $2, $3, $4, $5, $5, $6) ON CONFLICT (name) DO NOTHING RETURNING id";
    let (at, head) = (now.as_micros(), to_sql(end.decided));
    let values: Params<'_> = &[
        &spec.name.as_str(),
        &spec.ordered,
        &to_sql(cursor),
        &head,
        &at,
        &owner,
    ];
    let row = tx.first("declaring a group", sql, values).await?;
    let Some(row) = row else {
        // Declared by another engine at the same moment: the transaction runs again.
        return Err(Error::new(Code::Busy, "the group was declared meanwhile"));
    };
    Ok(Group {
        id: get(&row, 0)?,
        name: spec.name.clone(),
        ordered: spec.ordered,
        cursor,
        dropped_to: 0,
        owner,
        patterns: Vec::new(),
    })
}

async fn subscribe(
    tx: &Tx<'_>,
    group: &Group,
    spec: &SubscriptionSpec,
    now: Timestamp,
) -> Result<SubscriptionInfo> {
    let doing = "declaring a subscription";
    let info = |id: EventId, after: u64, created_at: Timestamp| SubscriptionInfo {
        id,
        group: group.name.clone(),
        name: spec.name.clone(),
        pattern: spec.pattern.clone(),
        after: Cursor::seq(after),
        created_at,
    };
    let sql = "SELECT id, event_type, after_seq, created_at FROM everbus.subscriptions
               WHERE group_id = $1 AND name = $2";
    if let Some(row) = tx.first(doing, sql, &[&group.id, &spec.name]).await? {
        let id: uuid::Uuid = get(&row, 0)?;
        let (pattern, mut after): (&str, u64) = (get(&row, 1)?, get_seq(&row, 2)?);
        if pattern != spec.pattern.as_str() {
            after = group.cursor;
            let sql =
                "UPDATE everbus.subscriptions SET event_type = $2, after_seq = $3 WHERE id = $1";
            tx.execute(doing, sql, &[&id, &spec.pattern.as_str(), &to_sql(after)])
                .await?;
        }
        return Ok(info(
            id.into(),
            after,
            Timestamp::from_micros(get(&row, 3)?),
        ));
    }
    let id = EventId::new();
    let sql =
        "INSERT INTO everbus.subscriptions (id, event_type, created_at, group_id, name, after_seq)
               VALUES ($1, $2, $3, $4, $5, $6)";
    let (at, after) = (now.as_micros(), to_sql(group.cursor));
    let values: Params<'_> = &[
        &id.as_uuid(),
        &spec.pattern.as_str(),
        &at,
        &group.id,
        &spec.name,
        &after,
    ];
    tx.execute(doing, sql, values).await?;
    Ok(info(id, group.cursor, now))
}

/// Skips events that wait for a handler and match no subscription of the group any more. In an ordered group
/// they would hold up every later event with their key.
async fn skip_unwanted(
    engine: &Postgres,
    tx: &Tx<'_>,
    group: &Group,
    now: Timestamp,
) -> Result<()> {
    let doing = "reading what has no handler";
    let sql = "SELECT seq, type, attempt, failures FROM everbus.deliveries
               WHERE group_id = $1 AND state = 3";
    let rows = tx.query(doing, sql, &[&group.id]).await?;
    let types = rows.iter().filter_map(|row| get::<i32>(row, 1).ok());
    let names = engine.types.learn(tx, types).await?;
    let (mut skips, mut seqs) = (Vec::new(), Vec::new());
    for row in &rows {
        let name = names.get(&get(row, 1)?);
        if name.is_some_and(|name| group.wants(name)) {
            continue;
        }
        let seq = get_seq(row, 0)?;
        let failures = read_failures(get(row, 3)?).unwrap_or_default();
        if !failures.is_empty() {
            let attempts = u32::try_from(get::<i32>(row, 2)?).unwrap_or(0);
            outcomes::keep(tx, (group.id, seq), (attempts, failures), None, now).await?;
        }
        skips.push((group.id, seq, UNSUBSCRIBED.to_owned()));
        seqs.push(to_sql(seq));
    }
    if seqs.is_empty() {
        return Ok(());
    }
    write_skips(tx, &skips, now.as_micros()).await?;
    let sql = "DELETE FROM everbus.deliveries WHERE group_id = $1 AND seq = ANY ($2)";
    tx.execute(doing, sql, &[&group.id, &seqs]).await.map(drop)
}

/// The tables with rows of a group.
const TABLES: [&str; 8] = [
    "subscriptions",
    "claims",
    "deliveries",
    "dead_letters",
    "skips",
    "outcomes",
    "failures",
    "inbox",
];

/// Deletes a group and all its rows. The caller has locked it.
pub(crate) async fn remove_numbered(db: &impl Sql, id: i64) -> Result<()> {
    let doing = "removing a group";
    for table in TABLES {
        let sql = format!("DELETE FROM everbus.{table} WHERE group_id = $1");
        db.execute(doing, &sql, &[&id]).await?;
    }
    db.execute(doing, "DELETE FROM everbus.groups WHERE id = $1", &[&id])
        .await
        .map(drop)
}
