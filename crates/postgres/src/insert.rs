//! The statements that insert events into the log.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use everbus_core::{Appended, Code, Error, Event, EventId, Position, Result, Timestamp};

use crate::append::{check_texts, key_of, texts};
use crate::pool::{Conn, Param, Sql};
use crate::rows::{NewRow, get, get_seq};

/// Up to this average size of payloads, the arrays are in the list of values: see [`new_rows`].
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
/// and an optional column that no event has is not sent.
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
    // The arrays: column, type and values.
    let mut arrays: Vec<(&str, &str, &dyn Param)> = vec![
        ("occurred_at", "bigint", &c.occurred_at),
        ("checksum", "integer", &c.checksums),
        ("id", "uuid", &c.ids),
        ("payload", "bytea", &c.payloads),
    ];
    let mut singles: Vec<(&str, &dyn Param)> = vec![("received_at", &received_at)];
    match c.types.first() {
        Some(first) if c.types.iter().all(|other| other == first) => singles.push(("type", first)),
        _ => arrays.push(("type", "integer", &c.types)),
    }
    match c.versions.first() {
        Some(first) if c.versions.iter().all(|other| other == first) => {
            singles.push(("version", first));
        }
        _ => arrays.push(("version", "bigint", &c.versions)),
    }
    match c.tenants.first() {
        Some(first) if c.tenants.iter().all(|other| other == first) => {
            singles.push(("tenant", first));
        }
        _ => arrays.push(("tenant", "text", &c.tenants)),
    }
    if c.expires_at.iter().any(Option::is_some) {
        arrays.push(("expires_at", "bigint", &c.expires_at));
    }
    let optional = [
        ("app", &c.apps),
        ("entity_type", &c.entity_types),
        ("entity_id", &c.entity_ids),
        ("address", &c.addresses),
    ];
    for (name, texts) in optional {
        if texts.iter().any(Option::is_some) {
            arrays.push((name, "text", texts));
        }
    }
    if c.attrs.iter().any(Option::is_some) {
        arrays.push(("attrs", "text", &c.attrs));
    }
    let bytes: usize = c.payloads.iter().map(|payload| payload.len()).sum();
    let sql = new_rows(&singles, &arrays, ids, bytes <= SMALL * events.len());
    let values = singles.iter().map(|(_, value)| *value);
    let values: Vec<&dyn Param> = values.chain(arrays.iter().map(|(_, _, v)| *v)).collect();
    let rows = match ids {
        Ids::Unseen => conn.query_planned("publishing", &sql, &values).await?,
        Ids::LookedUp => conn.query("publishing", &sql, &values).await?,
    };
    if rows.is_empty() {
        return Ok(None);
    }
    let mut inserted = Vec::with_capacity(rows.len());
    for (row, event) in rows.iter().zip(events) {
        if EventId::from(get::<uuid::Uuid>(row, 2)?) != event.id() {
            break;
        }
        let position = Position::seq(get_seq(row, 0)?);
        let received_at = Timestamp::from_micros(get(row, 1)?);
        inserted.push(Appended::new(event.id(), position, received_at));
    }
    if inserted.len() < events.len() {
        let what = "events were stored in another order";
        return Err(Error::new(Code::Internal, what).with_unknown_outcome());
    }
    Ok(Some(inserted))
}

/// The statement for new rows, with the values of `singles` and then those of `arrays`.
///
/// `unnest` returns the elements in order, and several of them advance together, so rows get their numbers in order. In
/// the `FROM` clause, the server first copies all elements. For small payloads the list of values is quicker, by about a
/// tenth of the statement; for payloads of 4 KB the `FROM` clause is.
fn new_rows(
    singles: &[(&str, &dyn Param)],
    arrays: &[(&str, &str, &dyn Param)],
    ids: Ids,
    small: bool,
) -> String {
    let (mut columns, mut values) = (Vec::new(), Vec::new());
    for (index, (name, _)) in singles.iter().enumerate() {
        columns.push(*name);
        values.push(match *name {
            // Times of receipt never decrease, even if the clock is set back.
            "received_at" => "greatest($1, (SELECT l.received_at FROM everbus.log l ORDER BY l.seq DESC LIMIT 1))".to_owned(),
            _ => format!("${}", index + 1),
        });
    }
    let mut sources = Vec::new();
    let mut names = Vec::new();
    let mut looked_up = String::new();
    for (index, (name, sql_type, _)) in arrays.iter().enumerate() {
        let place = singles.len() + index + 1;
        columns.push(*name);
        let source = format!("${place}::{sql_type}[]");
        if small {
            values.push(format!("unnest({source})"));
        } else {
            values.push(format!("x.{name}"));
            names.push(*name);
            sources.push(source);
        }
        if *name == "id" && ids == Ids::LookedUp {
            looked_up = format!(
                "WHERE NOT EXISTS (SELECT 1 FROM everbus.log k WHERE k.id = ANY (${place}))"
            );
        }
    }
    let from = match small {
        true => String::new(),
        false => format!(
            "FROM unnest({}) AS x ({})",
            sources.join(", "),
            names.join(", ")
        ),
    };
    format!(
        "INSERT INTO everbus.log ({}) SELECT {} {from} {looked_up} RETURNING seq, received_at, id",
        columns.join(", "),
        values.join(", "),
    )
}

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
