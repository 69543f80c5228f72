//! Payments are booked exactly once, although the process dies half-way and everything comes twice.
//!
//! Run it with `cargo run -p everbus-examples --bin exactly-once`. It works on a temporary file.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use everbus::rusqlite::{Connection, OptionalExtension};
use everbus::testing::Duplicator;
use everbus::{
    Bus, Cursor, Event, HandlerError, Payload, Receipt, Router, State, TypedEvent, sqlite, to,
};
use serde::{Deserialize, Serialize};

#[derive(Clone, Serialize, Deserialize, Event)]
#[event(type = "payments.payment.received")]
struct PaymentReceived {
    number: u32,
    account: String,
    cents: i64,
}

#[derive(Serialize, Deserialize, Event)]
#[event(type = "ledger.entry.booked")]
struct EntryBooked {
    payment: u32,
}

/// Where this process crashes.
#[derive(Clone, Copy)]
struct DieAt(Option<u32>);

/// Books a payment. The closure runs in the transaction that also acks the event.
async fn book(
    Payload(payment): Payload<PaymentReceived>,
    State(die_at): State<DieAt>,
) -> sqlite::InTransaction {
    // Slow work, such as asking another service, belongs here, before the transaction.
    sqlite::in_transaction(move |tx| {
        tx.execute(
            "CREATE TABLE IF NOT EXISTS balance (account TEXT PRIMARY KEY, cents INTEGER)",
            (),
        )?;
        tx.execute(
            "INSERT INTO balance VALUES (?1, ?2) ON CONFLICT DO UPDATE SET cents = cents + ?2",
            (&payment.account, payment.cents),
        )?;
        if die_at.0 == Some(payment.number) {
            println!(
                "  payment {} is booked, not acked, and the process dies",
                payment.number
            );
            std::process::abort();
        }
        Ok::<_, HandlerError>(EntryBooked {
            payment: payment.number,
        })
    })
}

fn ledger(die_at: Option<u32>) -> Router {
    Router::new()
        .on(PaymentReceived::TYPE, to(book).group("ledger"))
        .with_state(DieAt(die_at))
}

fn payment(number: u32) -> PaymentReceived {
    let account = if number.is_multiple_of(2) {
        "Bob"
    } else {
        "Ada"
    };
    PaymentReceived {
        number,
        account: account.to_owned(),
        cents: 100,
    }
}

/// Publishes a payment under its own id, so that publishing it again changes nothing.
async fn receive(bus: &Bus, number: u32) -> everbus::Result<Receipt> {
    let event = payment(number).builder();
    bus.publish(event.foreign_id(format!("payment-{number}")))
        .await
}

fn show_balances(file: &Path) -> Result<(), Box<dyn Error>> {
    let db = Connection::open(file)?;
    let cents = "SELECT cents FROM balance WHERE account = ?1";
    for account in ["Ada", "Bob"] {
        let cents: Option<i64> = db
            .query_row(cents, [account], |row| row.get(0))
            .optional()?;
        println!("  {account} has {}", cents.unwrap_or_default());
    }
    Ok(())
}

/// The process that crashes: three payments succeed, and it dies during the fourth.
async fn first_life(file: &str) -> everbus::Result<()> {
    let bus = Bus::open(file).await?;
    bus.mount(ledger(Some(4))).await?;
    bus.start().await?;
    for number in 1..=4 {
        receive(&bus, number).await?.settled().await?;
        println!("  payment {number} is booked and acked");
    }
    Ok(())
}

/// Another process on the same file, in which every event is delivered twice.
async fn second_life(file: &str) -> everbus::Result<()> {
    let engine = Bus::open(file).await?.engine().clone();
    let bus = Bus::builder().with_engine(Duplicator::wrap(engine))?;
    let runs = Arc::new(AtomicU32::new(0));
    let count = runs.clone();
    let plain = move || {
        count.fetch_add(1, Ordering::SeqCst);
        async {}
    };
    // A group without an inbox, to show that deliveries do come twice.
    let plain = Router::new().on(PaymentReceived::TYPE, to(plain).group("plain"));
    bus.mount(ledger(None).merge(plain)).await?;
    bus.start().await?;
    // It is not known how far the first process came, so the fourth payment is published again.
    for number in 4..=6 {
        let receipt = receive(&bus, number).await?;
        receipt.settled().await?;
        let news = if receipt.is_duplicate() {
            "was there already"
        } else {
            "is new"
        };
        println!("  payment {number} {news}; it is booked and acked");
    }
    let runs = runs.load(Ordering::SeqCst);
    println!("  a plain handler ran {runs} times for the 2 new payments");
    let booked = bus
        .log()?
        .read(Cursor::START, vec![EntryBooked::TYPE.parse()?], 100)
        .await?
        .0;
    println!("  {} events say that something was booked", booked.len());
    bus.shutdown().await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    if let Some(file) = std::env::args().nth(1) {
        return Ok(first_life(&file).await?);
    }
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("bank.db");
    let file = path.display().to_string();

    println!("A first process books payments, 100 each, in turn for Ada and Bob:");
    let ended = Command::new(std::env::current_exe()?).arg(&file).status()?;
    println!(
        "It ended with {}.",
        if ended.success() {
            "success"
        } else {
            "a crash"
        }
    );
    show_balances(&path)?;

    println!("\nA second process takes over:");
    second_life(&file).await?;
    show_balances(&path)?;
    println!("\nSix payments of 100, 300 for each: every one was booked once.");
    Ok(())
}
