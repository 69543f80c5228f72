//! Creates and updates the tables: a list of migrations, each applied once, under an advisory lock.

use everbus_core::{Code, Error, Result};

use crate::pool::{Conn, Sql as _};
use crate::rows::get;

/// The migrations in order. The place of a migration in the list, counted from 1, is the version that it leads to.
const MIGRATIONS: &[&[&str]] = &[
    &[
        include_str!("sql/broker.sql"),
        include_str!("sql/claim.sql"),
        include_str!("sql/views.sql"),
        include_str!("sql/outbox.sql"),
        include_str!("sql/store.sql"),
        include_str!("sql/audit.sql"),
    ],
    // Claims work with isolation levels other than read committed, and after a failover.
    &[include_str!("sql/claim.sql")],
    // Claims and acks without JIT.
    &[include_str!("sql/claim.sql")],
    // Claims with fewer and cheaper statements.
    &[include_str!("sql/claim.sql")],
    // Claims return fewer columns, and lock the group at once if there are probably events.
    &[include_str!("sql/claim.sql")],
    // Claims say when nothing is left to claim.
    &[include_str!("sql/claim.sql")],
];

/// The version of the tables that this engine uses.
pub(crate) const VERSION: usize = MIGRATIONS.len();

/// Written into the table `meta`, so that a schema of another program is not taken for ours.
const MARK: &str = "everbus";

/// What is found in the database.
enum Found {
    Nothing,
    Version(usize),
}

/// Makes or updates the tables.
pub(crate) async fn prepare(conn: &mut Conn, schema: &str, create: bool) -> Result<()> {
    let doing = "preparing the database";
    if let Found::Version(version) = look(conn, schema).await?
        && version == VERSION
    {
        return Ok(());
    }
    if !create {
        return Err(Error::new(
            Code::NoSuchFile,
            format!("the database has no schema {schema} of this version"),
        )
        .hint("open it once with a command that may create it, such as `everbus publish`"));
    }
    let tx = conn.begin(doing).await?;
    // Two engines that start at once prepare one after the other.
    let sql = "SELECT pg_advisory_xact_lock(hashtextextended('everbus migrations ' || $1, 0))";
    tx.query(doing, sql, &[&schema]).await?;
    let from = match look(&tx, schema).await? {
        Found::Version(version) => version,
        Found::Nothing => {
            tx.batch(doing, &format!("CREATE SCHEMA IF NOT EXISTS {schema}"))
                .await?;
            tx.batch(
                doing,
                "CREATE TABLE everbus.meta (key text PRIMARY KEY, value text NOT NULL);
                 INSERT INTO everbus.meta VALUES ('log_id', replace(gen_random_uuid()::text, '-', ''))",
            )
            .await?;
            0
        }
    };
    for migration in MIGRATIONS.iter().skip(from) {
        for statements in *migration {
            tx.batch(doing, statements).await?;
        }
    }
    let sql = "INSERT INTO everbus.meta VALUES ('made_by', $1), ('schema_version', $2)
               ON CONFLICT (key) DO UPDATE SET value = excluded.value";
    tx.execute(doing, sql, &[&MARK, &VERSION.to_string()])
        .await?;
    tx.commit(doing).await
}

/// Finds the version of the tables. Refuses the schema of another program, and a newer version.
async fn look(db: &impl crate::pool::Sql, schema: &str) -> Result<Found> {
    let doing = "looking at the database";
    let sql = "SELECT
        (SELECT count(*) FROM pg_catalog.pg_class c
           JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1),
        EXISTS (SELECT 1 FROM information_schema.columns
           WHERE table_schema = $1 AND table_name = 'meta' AND column_name = 'value')";
    let row = db.one(doing, sql, &[&schema]).await?;
    let (tables, has_meta): (i64, bool) = (get(&row, 0)?, get(&row, 1)?);
    if tables == 0 {
        return Ok(Found::Nothing);
    }
    let foreign = || {
        Error::new(
            Code::NotEverbus,
            format!("the schema {schema} of the database belongs to another program"),
        )
        .hint("name another schema in the URL: ?schema=everbus_events")
    };
    if !has_meta {
        return Err(foreign());
    }
    let sql =
        "SELECT key, value::text FROM everbus.meta WHERE key IN ('made_by', 'schema_version')";
    let rows = db
        .query(doing, sql, &[])
        .await
        .map_err(|e| match e.code() {
            Code::Internal => foreign(),
            _ => e,
        })?;
    let (mut ours, mut version) = (false, None);
    for row in rows {
        let (key, value): (&str, &str) = (get(&row, 0)?, get(&row, 1)?);
        match key {
            "made_by" => ours = value == MARK,
            _ => version = value.parse::<usize>().ok(),
        }
    }
    match version {
        Some(version) if ours && version > VERSION => Err(Error::new(
            Code::NewerSchema,
            format!("the tables are of version {version}, this build knows version {VERSION}"),
        )
        .hint("use a newer build of Everbus; nothing was changed")),
        Some(version) if ours => Ok(Found::Version(version)),
        _ => Err(foreign()),
    }
}
