//! Databases and servers that cannot be used: each with an error of its own, and what to do about it.

use std::sync::Arc;
use std::time::Duration;

use everbus_core::{Code, Error, SystemClock};
use everbus_postgres::Options;
use everbus_testkit::servers::{Certificates, Postgres, PostgresOptions};

use crate::support::options;

async fn refused(url: &str) -> Error {
    refused_with(url, brief()).await
}

fn brief() -> Options {
    Options {
        patience: Duration::from_secs(3),
        ..options(Arc::new(SystemClock))
    }
}

async fn refused_with(url: &str, options: Options) -> Error {
    let error = everbus_postgres::open(url, options)
        .await
        .map(drop)
        .unwrap_err();
    assert!(error.hint_text().is_some(), "{error:?}");
    assert!(!format!("{error:?}").contains("wrong-secret"), "{error:?}");
    error
}

// conformance: engines/postgres-bad-input: a wrong password, a missing or foreign database, a newer schema, a read replica and a lack of connections are told apart, with hints
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_used_is_refused_with_a_hint() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();

    let (base, _) = url.rsplit_once('/').unwrap();
    let missing = refused(&format!("{base}/no_such_database")).await;
    assert_eq!(missing.code(), Code::InvalidUrl);
    assert!(missing.message().contains("no_such_database"), "{missing}");

    // A schema of another program.
    server.sql_at(
        &url,
        "CREATE SCHEMA everbus; CREATE TABLE everbus.orders (id integer)",
    );
    assert_eq!(refused(&url).await.code(), Code::NotEverbus);
    assert_eq!(
        server.sql_at(&url, "SELECT count(*) FROM everbus.orders"),
        "0",
        "left as it was"
    );
    server.sql_at(&url, "CREATE TABLE everbus.meta (key text, value text)");
    assert_eq!(refused(&url).await.code(), Code::NotEverbus);

    // Beside it everything is fine, until a newer version comes.
    let other = format!(
        "{url}{}schema=events2",
        if url.contains('?') { '&' } else { '?' }
    );
    let none = Options {
        create: false,
        ..brief()
    };
    assert_eq!(refused_with(&other, none).await.code(), Code::NoSuchFile);
    let engine = everbus_postgres::open(&other, brief()).await.unwrap();
    engine.broker.close().await.unwrap();
    server.sql_at(
        &url,
        "UPDATE events2.meta SET value = '99' WHERE key = 'schema_version'",
    );
    assert_eq!(refused(&other).await.code(), Code::NewerSchema);

    // No server is there.
    let away = refused("postgres://postgres@127.0.0.1:1/x").await;
    assert_eq!(away.code(), Code::Unavailable);
}

// conformance: engines/postgres-migration: a database of an earlier version is brought to this one when it is opened
// conformance: engines/postgres-jit: the functions switch jit off, also in a database of an earlier version
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_earlier_version_is_updated() {
    let Some(server) = Postgres::shared() else {
        return;
    };
    let url = server.fresh_database();
    let engine = everbus_postgres::open(&url, brief()).await.unwrap();
    engine.broker.close().await.unwrap();
    let version = "SELECT value FROM everbus.meta WHERE key = 'schema_version'";
    let newest = server.sql_at(&url, version);
    let claim = "SELECT prosrc FROM pg_proc WHERE proname = 'claim_new'";
    let function = server.sql_at(&url, claim);
    let settings = "SELECT string_agg(proconfig::text, ' ' ORDER BY proname) FROM pg_proc
                    WHERE proname IN ('ack', 'claim_new') AND pronamespace = 'everbus'::regnamespace";
    let configured = server.sql_at(&url, settings);
    // Their plans look dear, so that the server would compile them for each call.
    assert_eq!(configured.matches("jit=off").count(), 2, "{configured}");
    // Earlier versions had another body, the first also other settings.
    for earlier in ["1", "3"] {
        let forge = format!(
            "UPDATE everbus.meta SET value = '{earlier}' WHERE key = 'schema_version';
             ALTER FUNCTION everbus.ack RESET jit;
             UPDATE pg_proc SET prosrc = 'BEGIN END' WHERE proname = 'claim_new'"
        );
        server.sql_at(&url, &forge);
        let engine = everbus_postgres::open(&url, brief()).await.unwrap();
        engine.broker.close().await.unwrap();
        assert_eq!(server.sql_at(&url, version), newest, "from {earlier}");
        assert_eq!(server.sql_at(&url, claim), function, "from {earlier}");
        assert_eq!(server.sql_at(&url, settings), configured, "from {earlier}");
    }
}

// conformance: engines/postgres-bad-input: a wrong password is told as such
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_told_as_such() {
    let options = PostgresOptions::default()
        .password("right")
        .setting("fsync=off");
    let Some(server) = Postgres::start_with(options) else {
        return;
    };
    let url = server.url();
    assert!(url.contains("right"), "{url}");
    let error = refused(&url.replace("right", "wrong-secret")).await;
    assert_eq!(error.code(), Code::InvalidUrl, "{error:?}");
    assert!(error.hint_text().unwrap().contains("password"));
    everbus_postgres::open(&url, brief()).await.unwrap();
}

// conformance: engines/postgres-bad-input: a read replica and a server without free connections are told as such
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_and_a_full_server_are_told_as_such() {
    let options = PostgresOptions::default()
        .setting("fsync=off")
        .setting("max_connections=6")
        .setting("superuser_reserved_connections=0")
        .setting("max_wal_senders=0");
    let Some(server) = Postgres::start_with(options) else {
        return;
    };
    let url = server.fresh_database();
    let mut taken = Vec::new();
    for _ in 0..6 {
        let no_tls = everbus_postgres::tokio_postgres::NoTls;
        let (client, connection) = everbus_postgres::tokio_postgres::connect(&url, no_tls)
            .await
            .unwrap();
        tokio::spawn(connection);
        taken.push(client);
    }
    let error = refused(&url).await;
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    assert!(
        error.hint_text().unwrap().contains("max_connections"),
        "{error:?}"
    );
    drop(taken);
    server.restart_as_replica();
    let error = refused(&url).await;
    assert_eq!(error.code(), Code::ReadOnly, "{error:?}");
    assert!(error.message().contains("replica"), "{error}");
}

// conformance: engines/postgres-tls: sslmode=verify-full connects to a server whose certificate the named authority signed and refuses one that it did not; sslmode=require encrypts without asking who answers
// needs: PostgreSQL
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encrypted_connection_is_checked_as_asked() {
    let (Some(ours), Some(others)) = (Certificates::make(), Certificates::make()) else {
        return;
    };
    let Some(server) = Postgres::start_with(PostgresOptions::default().tls(&ours)) else {
        return;
    };
    let database = server.fresh_database();
    let trusting = |authority: &Certificates| {
        let file = authority.authority();
        format!(
            "{database}?sslmode=verify-full&sslrootcert={}",
            file.display()
        )
    };
    for url in [trusting(&ours), format!("{database}?sslmode=require")] {
        let engine = everbus_postgres::open(&url, brief()).await.unwrap();
        let encrypted = "SELECT count(*) FROM pg_stat_ssl WHERE ssl AND pid <> pg_backend_pid()";
        let encrypted: u32 = server.sql(encrypted).trim().parse().unwrap();
        assert!(encrypted > 0, "no connection of {url} is encrypted");
        engine.broker.close().await.unwrap();
    }
    let error = refused(&trusting(&others)).await;
    assert!(error.message().contains("certificate"), "{error:?}");
}
