//! The statements that insert events into the log.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use everbus_core::{Appended, Code, Error, Event, EventId, Position, Result, Timestamp};

use crate::append::{check_texts, key_of, texts};
use crate::pool::{Conn, Param, Sql};
use crate::rows::{NewRow, get, get_seq, seq_from};

/// Up to this average size of payloads, the arrays are in the list of values: see [`Sent::statement`].
const SMALL: usize = 1024;

/// How an id that is taken is found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ids {
    /// By the unique index: an id that is taken fails the statement with [`Code::Busy`].
    Unseen,
    /// The statement looks the ids up first, and does nothing if one is taken. An id that another transaction takes at
    /// the same moment fails the statement.
    LookedUp,
}

/// Inserts events with new ids, and answers in their order. `None`: an id is taken, and nothing was done.
///
/// Every array costs time for each row. So a type, version or tenant that all events share is sent as a single value,
/// and an optional column that no event has is not sent. An event that comes alone is sent without arrays.
pub(crate) async fn insert_new(
    conn: &Conn,
    events: &[&Event],
    types: &HashMap<Arc<str>, i32>,
    received_at: i64,
    ids: Ids,
) -> Result<Option<Vec<Appended>>> {
    let mut c = Columns::with_capacity(events.len());
    for event in events {
        c.push(event, types)?;
    }
    let mut sent = Sent {
        singles: vec![("received_at", &received_at)],
        arrays: Vec::new(),
        alone: events.len() == 1,
    };
    sent.add("occurred_at", "bigint", &c.occurred_at);
    sent.add("checksum", "integer", &c.checksums);
    sent.add("id", "uuid", &c.ids);
    sent.add("payload", "bytea", &c.payloads);
    sent.add_shared("type", "integer", &c.types);
    sent.add_shared("version", "bigint", &c.versions);
    sent.add_shared("tenant", "text", &c.tenants);
    sent.add_optional("expires_at", "bigint", &c.expires_at);
    sent.add_optional("app", "text", &c.apps);
    sent.add_optional("entity_type", "text", &c.entity_types);
    sent.add_optional("entity_id", "text", &c.entity_ids);
    sent.add_optional("address", "text", &c.addresses);
    sent.add_optional("attrs", "text", &c.attrs);
    let bytes: usize = c.payloads.iter().map(|payload| payload.len()).sum();
    let sql = sent.statement(ids, bytes <= SMALL * events.len());
    let values = sent.values();
    let rows = match ids {
        Ids::Unseen => conn.query_planned("publishing", &sql, &values).await?,
        Ids::LookedUp => conn.query("publishing", &sql, &values).await?,
    };
    let Some(row) = rows.first() else {
        return Ok(None);
    };
    let Some(received_at) = get::<Option<i64>>(row, 0)? else {
        return Ok(None);
    };
    let received_at = Timestamp::from_micros(received_at);
    // `unnest` returns the elements in their order, and the rows get their numbers in the order of the events.
    let seqs: Vec<i64> = get(row, 1)?;
    if seqs.len() != events.len() || !seqs.is_sorted_by(|a, b| a < b) {
        let what = "an insert did not answer with one number for each event";
        return Err(Error::new(Code::Internal, what).with_unknown_outcome());
    }
    let inserted = events.iter().zip(seqs).map(|(event, seq)| {
        let position = Position::seq(seq_from(seq));
        Appended::new(event.id(), position, received_at)
    });
    Ok(Some(inserted.collect()))
}

/// The columns of new rows as they are sent: single values that hold for every row, and arrays.
struct Sent<'a> {
    singles: Vec<(&'static str, &'a dyn Param)>,
    /// Column, type and values.
    arrays: Vec<(&'static str, &'static str, &'a dyn Param)>,
    /// There is only one row.
    alone: bool,
}

impl<'a> Sent<'a> {
    fn add<T: Param>(&mut self, name: &'static str, sql_type: &'static str, values: &'a Vec<T>)
    where
        Vec<T>: Param,
    {
        match values.first() {
            Some(only) if self.alone => self.singles.push((name, only)),
            _ => self.arrays.push((name, sql_type, values)),
        }
    }

    /// Adds a column that often has the same value in every row.
    fn add_shared<T: Param + PartialEq>(
        &mut self,
        name: &'static str,
        sql_type: &'static str,
        values: &'a Vec<T>,
    ) where
        Vec<T>: Param,
    {
        match values.first() {
            Some(first) if values.iter().all(|other| other == first) => {
                self.singles.push((name, first));
            }
            _ => self.arrays.push((name, sql_type, values)),
        }
    }

    /// Adds a column, unless it is NULL in every row.
    fn add_optional<T>(
        &mut self,
        name: &'static str,
        sql_type: &'static str,
        values: &'a Vec<Option<T>>,
    ) where
        Option<T>: Param,
        Vec<Option<T>>: Param,
    {
        if values.iter().any(Option::is_some) {
            self.add(name, sql_type, values);
        }
    }

    /// The values, in the order of their places in the statement.
    fn values(&self) -> Vec<&'a dyn Param> {
        let singles = self.singles.iter().map(|(_, value)| *value);
        let arrays = self.arrays.iter().map(|(_, _, values)| *values);
        singles.chain(arrays).collect()
    }

    /// The statement that inserts the rows. It answers with one row, because each row of an answer costs the server and
    /// this process time: the time of receipt, which all new rows share, and their numbers in order. Both are NULL, or
    /// there is no row, if an id is taken.
    ///
    /// `unnest` returns the elements in order, and several of them advance together, so rows get their numbers in order.
    /// In the `FROM` clause, the server first copies all elements. For small payloads (`small`) the list of values is
    /// quicker, by about a tenth of the statement; for payloads of 4 KB the `FROM` clause is.
    fn statement(&self, ids: Ids, small: bool) -> String {
        let (mut columns, mut values) = (Vec::new(), Vec::new());
        let mut looked_up = String::new();
        for (index, (name, _)) in self.singles.iter().enumerate() {
            columns.push(*name);
            let place = format!("${}", index + 1);
            if *name == "id" && ids == Ids::LookedUp {
                looked_up = format!("WHERE {UNSEEN} k.id = {place})");
            }
            values.push(match *name {
                // Times of receipt never decrease, even if the clock is set back.
                "received_at" => format!(
                    "greatest({place}, (SELECT l.received_at FROM everbus.log l ORDER BY l.seq DESC LIMIT 1))"
                ),
                _ => place,
            });
        }
        let (mut names, mut sources) = (Vec::new(), Vec::new());
        for (index, (name, sql_type, _)) in self.arrays.iter().enumerate() {
            columns.push(*name);
            let place = format!("${}", self.singles.len() + index + 1);
            if *name == "id" && ids == Ids::LookedUp {
                looked_up = format!("WHERE {UNSEEN} k.id = ANY ({place}))");
            }
            let source = format!("{place}::{sql_type}[]");
            if small {
                values.push(format!("unnest({source})"));
            } else {
                values.push(format!("x.{name}"));
                names.push(*name);
                sources.push(source);
            }
        }
        let from = match sources.is_empty() {
            true => String::new(),
            false => format!(
                "FROM unnest({}) AS x ({})",
                sources.join(", "),
                names.join(", ")
            ),
        };
        let insert = format!(
            "INSERT INTO everbus.log ({}) SELECT {} {from} {looked_up}",
            columns.join(", "),
            values.join(", "),
        );
        match self.alone {
            true => format!("{insert} RETURNING received_at, ARRAY[seq]"),
            false => format!(
                "WITH stored AS ({insert} RETURNING received_at, seq)
                 SELECT max(received_at), array_agg(seq) FROM stored"
            ),
        }
    }
}

/// The begin of the condition that no event has an id.
const UNSEEN: &str = "NOT EXISTS (SELECT 1 FROM everbus.log k WHERE";

/// Inserts the events whose ids are free, each with its time of receipt, and returns them. An event whose id is taken
/// is left out before it takes a number; only an id that another transaction takes at the same moment leaves a gap.
pub(crate) async fn insert<'e>(
    db: &impl Sql,
    events: &[&'e Event],
    types: &HashMap<Arc<str>, i32>,
    received_at: &[i64],
) -> Result<Vec<(&'e Event, Appended)>> {
    let mut columns = Columns::with_capacity(events.len());
    let mut times = Vec::with_capacity(events.len());
    let mut ids = HashSet::with_capacity(events.len());
    for (event, at) in events.iter().zip(received_at) {
        // A repetition in the batch would take a number and leave a gap.
        if ids.insert(key_of(event)) {
            columns.push(event, types)?;
            times.push(*at);
        }
    }
    // Times of receipt never decrease, even if the clock is set back.
    let sql =
        "INSERT INTO everbus.log (received_at, occurred_at, expires_at, type, version, checksum, id,
                 tenant, app, entity_type, entity_id, address, attrs, payload)
               SELECT greatest(x.received_at, (SELECT l.received_at FROM everbus.log l ORDER BY l.seq DESC LIMIT 1)),
                 x.occurred_at, x.expires_at, x.type, x.version, x.checksum, x.id, x.tenant, x.app,
                 x.entity_type, x.entity_id, x.address, x.attrs, x.payload
               FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::integer[], $5::bigint[], $6::integer[],
                 $7::uuid[], $8::text[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[],
                 $14::bytea[]) WITH ORDINALITY AS x (received_at, occurred_at, expires_at, type, version, checksum, id,
                 tenant, app, entity_type, entity_id, address, attrs, payload, place)
               WHERE NOT EXISTS (SELECT 1 FROM everbus.log k WHERE k.id = x.id AND k.tenant = x.tenant)
               ORDER BY x.place ON CONFLICT (id, hashtextextended(tenant, 0)) DO NOTHING
               RETURNING seq, received_at, id, tenant";
    let c = &columns;
    let rows = db
        .query(
            "publishing",
            sql,
            &[
                &times,
                &c.occurred_at,
                &c.expires_at,
                &c.types,
                &c.versions,
                &c.checksums,
                &c.ids,
                &c.tenants,
                &c.apps,
                &c.entity_types,
                &c.entity_ids,
                &c.addresses,
                &c.attrs,
                &c.payloads,
            ],
        )
        .await?;
    // Rows come in the order of the batch, with gaps where an id was taken.
    let mut rest = events.iter();
    let mut inserted = Vec::with_capacity(rows.len());
    for row in &rows {
        let (id, tenant): (uuid::Uuid, &str) = (get(row, 2)?, get(row, 3)?);
        let key = (EventId::from(id), tenant);
        let event = rest.find(|event| key_of(event) == key);
        let Some(event) = event else {
            return Err(Error::new(
                Code::Internal,
                "an event was stored that no caller sent",
            ));
        };
        let position = Position::seq(get_seq(row, 0)?);
        let received_at = Timestamp::from_micros(get(row, 1)?);
        inserted.push((*event, Appended::new(event.id(), position, received_at)));
    }
    Ok(inserted)
}

/// New rows of the log, column by column.
struct Columns<'a> {
    occurred_at: Vec<i64>,
    expires_at: Vec<Option<i64>>,
    types: Vec<i32>,
    versions: Vec<i64>,
    checksums: Vec<i32>,
    ids: Vec<uuid::Uuid>,
    tenants: Vec<&'a str>,
    apps: Vec<Option<&'a str>>,
    entity_types: Vec<Option<&'a str>>,
    entity_ids: Vec<Option<&'a str>>,
    addresses: Vec<Option<&'a str>>,
    attrs: Vec<Option<String>>,
    payloads: Vec<&'a [u8]>,
}

impl<'a> Columns<'a> {
    fn with_capacity(n: usize) -> Self {
        Self {
            occurred_at: Vec::with_capacity(n),
            expires_at: Vec::with_capacity(n),
            types: Vec::with_capacity(n),
            versions: Vec::with_capacity(n),
            checksums: Vec::with_capacity(n),
            ids: Vec::with_capacity(n),
            tenants: Vec::with_capacity(n),
            apps: Vec::with_capacity(n),
            entity_types: Vec::with_capacity(n),
            entity_ids: Vec::with_capacity(n),
            addresses: Vec::with_capacity(n),
            attrs: Vec::with_capacity(n),
            payloads: Vec::with_capacity(n),
        }
    }

    fn push(&mut self, event: &'a Event, types: &HashMap<Arc<str>, i32>) -> Result<()> {
        let row = NewRow::of(event)?;
        let attributes = event.attributes();
        check_texts(event)?;
        let [tenant, app, entity_type, entity_id, address] = texts(event);
        let type_id = types
            .get(event.type_arc())
            .copied()
            .ok_or_else(|| Error::new(Code::Internal, "an event type has no number"))?;
        self.occurred_at.push(event.occurred_at().as_micros());
        let expires = attributes.and_then(|a| a.expires_at);
        self.expires_at.push(expires.map(Timestamp::as_micros));
        self.types.push(type_id);
        self.versions.push(i64::from(event.version()));
        self.checksums.push(row.checksum);
        self.ids.push(event.id().as_uuid());
        self.tenants.push(tenant.unwrap_or_default());
        self.apps.push(app);
        self.entity_types.push(entity_type);
        self.entity_ids.push(entity_id);
        self.addresses.push(address);
        self.attrs.push(row.attrs);
        self.payloads.push(event.payload());
        Ok(())
    }
}
