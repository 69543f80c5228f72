//! An order service with its own database crashes between the two writes, and loses nothing.
//!
//! Run it with `cargo run -p everbus-examples --bin outbox-sqlite`. It works on temporary files.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use everbus::outbox::{Outbox, Relay};
use everbus::rusqlite::Connection;
use everbus::{Bus, Cursor, Event, Json, Router, TypedEvent, to};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize, Event)]
#[event(type = "orders.order.placed", key = "order")]
struct OrderPlaced {
    order: u32,
    cents: u32,
}

/// Where this process crashes.
#[derive(Clone, Copy, PartialEq)]
enum Death {
    /// After the order was written and before its event was.
    BetweenTheWrites(u32),
    /// After both were committed and before the event was published.
    BeforePublishing(u32),
}

/// The database of the service. Everbus uses only one table in it.
fn open_shop(file: &Path) -> Result<Connection, Box<dyn Error>> {
    let db = Connection::open(file)?;
    db.execute_batch("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, cents INTEGER)")?;
    Outbox::create_tables(&db)?;
    Ok(db)
}

/// Takes an order: two writes, one transaction.
fn place(db: &mut Connection, order: u32, death: Death) -> Result<(), Box<dyn Error>> {
    let cents = order * 1000;
    let tx = db.transaction()?;
    tx.execute("INSERT INTO orders VALUES (?1, ?2)", (order, cents))?;
    if death == Death::BetweenTheWrites(order) {
        println!("  order {order} is written, its event is not, and the process dies");
        std::process::abort();
    }
    Outbox::new().enqueue(&tx, OrderPlaced { order, cents })?;
    tx.commit()?;
    println!("  order {order} is stored with its event");
    if death == Death::BeforePublishing(order) {
        println!("  nothing was published yet, and the process dies");
        std::process::abort();
    }
    Ok(())
}

/// One run of the service, from its start to its end.
fn life(file: &Path, number: &str) -> Result<(), Box<dyn Error>> {
    let mut db = open_shop(file)?;
    let (orders, death) = match number {
        "1" => (1..=3, Death::BetweenTheWrites(3)),
        // The customer whose order failed tries again.
        _ => (3..=4, Death::BeforePublishing(4)),
    };
    for order in orders {
        place(&mut db, order, death)?;
    }
    Ok(())
}

fn run_life(file: &Path, number: &str) -> Result<(), Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let ended = Command::new(program).arg(file).arg(number).status()?;
    let how = if ended.success() {
        "success"
    } else {
        "a crash"
    };
    println!("It ended with {how}.");
    let db = open_shop(file)?;
    let list = |sql: &str| db.query_row(sql, [], |row| row.get::<_, String>(0));
    let orders = list("SELECT group_concat(id, ', ') FROM orders")?;
    let events = list(
        "SELECT group_concat(payload ->> '$.payload.order', ', ') FROM event_outbox
         WHERE status = 'pending'",
    )?;
    println!("  orders in the database: {orders}");
    println!("  events in the outbox:   {events}");
    Ok(())
}

/// A handler in another service, with another database.
async fn pack(Json(placed): Json<OrderPlaced>) {
    println!("  the warehouse packs order {}", placed.order);
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    if let (Some(file), Some(number)) = (args.next(), args.next()) {
        return life(Path::new(&file), &number);
    }
    let dir = tempfile::tempdir()?;
    let shop = dir.path().join("shop.db");

    println!("The order service runs:");
    run_life(&shop, "1")?;
    println!("\nIt is started again:");
    run_life(&shop, "2")?;

    println!("\nA relay takes what is in the outbox to the bus:");
    let url = dir.path().join("events.db").display().to_string();
    let bus = Bus::open(url).await?;
    let router = Router::new().on(
        OrderPlaced::TYPE,
        to(pack).group("warehouse").concurrency(1),
    );
    bus.mount(router).await?;
    bus.start().await?;
    let relay = Relay::new(&bus, Outbox::open(&shop)?);
    let stats = relay.run_until_empty().await?;
    let events = bus
        .log()?
        .read(Cursor::START, vec![OrderPlaced::TYPE.parse()?], 100)
        .await?
        .0;
    for event in &events {
        bus.engine()
            .settled()?
            .settled(event.position, std::time::Duration::from_secs(30))
            .await?;
    }
    println!("  {} events sent, {} failed", stats.sent, stats.failed);
    bus.shutdown().await?;
    println!("\nFour orders, four events: two crashes, and nothing was lost or made up.");
    Ok(())
}
