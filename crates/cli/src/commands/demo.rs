//! `everbus demo`: a small shop on a new file. Orders are paid, shipped and confirmed by e-mail; one
//! payment fails twice and then works, one order can never be paid and becomes a dead letter.

use std::path::Path;
use std::time::{Duration, Instant};

use everbus::{Bus, HandlerError, Message};
use everbus_core::{
    Code, Cursor, Error, Event, EventId, GroupInfo, Pattern, RetryPolicy, StartFrom,
};
use serde::Serialize;
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::files;
use crate::open::{Target, blocking, close};
use crate::output::{Output, counted, escaped};
use crate::stop::Outcome;

const FILE: &str = "everbus-demo.db";
const SOURCE: &str = "everbus-demo";
const GROUPS: [&str; 3] = ["payment", "shipping", "email"];
/// Pause between orders, so that a person can follow.
const PAUSE: Duration = Duration::from_millis(900);

/// Order, goods and total in cents. The third payment fails twice, the fourth always.
const ORDERS: [(u32, &str, i64); 5] = [
    (1001, "three books", 4150),
    (1002, "a lamp", 8900),
    (UNLUCKY, "a teapot", 3299),
    (1004, "a voucher", -500),
    (1005, "two chairs", 15_800),
];
const UNLUCKY: u32 = 1003;

/// One line of the demo.
#[derive(Debug, Serialize)]
struct Step {
    at_ms: u64,
    who: &'static str,
    what: &'static str,
    order: u32,
    text: String,
}

/// Given to handlers, so that they can report what they do.
#[derive(Clone)]
struct Teller {
    began: Instant,
    to: UnboundedSender<Step>,
}

impl Teller {
    fn tell(&self, who: &'static str, what: &'static str, order: u32, text: impl Into<String>) {
        let at_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let _ = self.to.send(Step {
            at_ms,
            who,
            what,
            order,
            text: text.into(),
        });
    }
}

pub(crate) async fn run(output: &mut Output) -> Outcome {
    let path = Path::new(FILE);
    if path.exists() {
        remove_previous(path).await?;
        if !output.is_json() {
            output.line(format!("{FILE} of an earlier demo is replaced."))?;
        }
    }
    if !output.is_json() {
        output.line(format!("A small shop on a new file, {FILE}."))?;
        output.line("Three groups work on its events: payment, shipping and email.\n")?;
        output.flush()?;
    }
    let bus = Target::file(path).open_bus().await?;
    let (to, mut steps) = unbounded_channel();
    let teller = Teller {
        began: Instant::now(),
        to,
    };
    open_shop(&bus, &teller).await?;
    bus.start().await?;
    watch(sell(&bus, teller), &mut steps, output).await?;
    let outcome = summarise(&bus, output).await;
    bus.shutdown().await?;
    outcome
}

/// A demo begins with a new file. Only the file of an earlier demo is replaced.
async fn remove_previous(path: &Path) -> Outcome {
    let engine = Target::file(path).open_existing().await?;
    let ours = is_ours(&engine).await;
    close(&engine).await;
    drop(engine);
    if !ours? {
        return Err(Error::new(
            Code::InvalidSetting,
            format!("{FILE} is here already and is not from a demo"),
        )
        .hint("run the demo in another directory; it uses a file of that name")
        .into());
    }
    let path = path.to_path_buf();
    let removed = blocking(move || {
        files::claim_alone(&path)?;
        files::remove(&path)
    });
    Ok(removed.await?)
}

async fn is_ours(engine: &everbus_core::Engine) -> everbus_core::Result<bool> {
    let groups = engine.broker.inspect().await?;
    let known = |group: &GroupInfo| GROUPS.contains(&group.name.as_str());
    let (first, _) = engine
        .log()?
        .read(Cursor::START, vec![Pattern::new("*")?], 1)
        .await?;
    let by_demo = |event: &Event| {
        event
            .attributes()
            .is_some_and(|a| a.source.as_deref() == Some(SOURCE))
    };
    Ok(match first.first() {
        Some(record) => by_demo(&record.event),
        // A demo that was interrupted before its first order.
        None => groups.iter().all(known),
    })
}

async fn open_shop(bus: &Bus, teller: &Teller) -> Outcome {
    let (till, tell) = (bus.clone(), teller.clone());
    bus.subscribe("order.placed")
        .group("payment")
        .name("charge")
        .start_from(StartFrom::First)
        .retry(RetryPolicy::default()) // 3 retries: after 1 s, 2 s, 4 s
        .handler(move |m: Message| charge(m, till.clone(), tell.clone()))
        .await?;
    let tell = teller.clone();
    bus.subscribe("payment.received")
        .group("shipping")
        .name("pack")
        .start_from(StartFrom::First)
        .handler(move |m: Message| pack(m, tell.clone()))
        .await?;
    let tell = teller.clone();
    bus.subscribe("payment.*")
        .group("email")
        .name("confirm")
        .start_from(StartFrom::First)
        .handler(move |m: Message| confirm(m, tell.clone()))
        .await?;
    Ok(())
}

#[derive(serde::Deserialize)]
struct Order {
    order: u32,
    goods: String,
    cents: i64,
}

async fn charge(m: Message, bus: Bus, teller: Teller) -> everbus::HandlerResult {
    let order: Order = m.json()?;
    let n = order.order;
    if order.cents <= 0 {
        let error = format!("the total is {}, which no card can pay", euros(order.cents));
        let text = format!("{error}: permanent, to the dead letters");
        teller.tell("payment", "dead-lettered", n, text);
        return Err(HandlerError::permanent(error));
    }
    if n == UNLUCKY && m.attempt() < 3 {
        let error = "the card terminal does not answer";
        let text = format!(
            "attempt {} of {} failed: {error}",
            m.attempt(),
            m.max_attempts()
        );
        teller.tell("payment", "failed", n, text);
        return Err(HandlerError::new(error));
    }
    let attempt = match m.attempt() {
        1 => String::new(),
        n => format!(" at attempt {n}"),
    };
    let text = format!("charged {}{attempt}", euros(order.cents));
    teller.tell("payment", "handled", n, text);
    // An id made from the order: if this handler ran again, the second publish would store nothing.
    let received = Event::builder("payment.received")
        .source(SOURCE)
        .foreign_id(format!("payment-{n}"))
        .entity("ORDER", n.to_string())
        .correlation_id(m.correlation_id())
        .causation_id(m.id().to_string())
        .json(&json!({ "order": n, "goods": order.goods, "cents": order.cents }));
    bus.publish(received).await?;
    Ok(())
}

async fn pack(m: Message, teller: Teller) -> everbus::HandlerResult {
    let order: Order = m.json()?;
    tokio::time::sleep(Duration::from_millis(150)).await;
    teller.tell(
        "shipping",
        "handled",
        order.order,
        format!("packed {}", order.goods),
    );
    Ok(())
}

async fn confirm(m: Message, teller: Teller) -> everbus::HandlerResult {
    let order: Order = m.json()?;
    teller.tell("email", "handled", order.order, "sent a confirmation");
    Ok(())
}

/// Publishes the orders and waits until every group is done with all events.
async fn sell(bus: &Bus, teller: Teller) -> everbus_core::Result<()> {
    for (order, goods, cents) in ORDERS {
        let event = Event::builder("order.placed")
            .source(SOURCE)
            .entity("ORDER", order.to_string())
            .json(&json!({ "order": order, "goods": goods, "cents": cents }));
        let receipt = bus.publish(event).await?;
        let text = format!("order.placed, {goods}: durable at seq {}", receipt.seq());
        teller.tell("shop", "published", order, text);
        tokio::time::sleep(PAUSE).await;
    }
    loop {
        let busy = |group: &GroupInfo| group.behind + group.in_flight + group.waiting > 0;
        if !bus.groups().await?.iter().any(busy) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Prints what happens while the shop is open, and then the rest.
async fn watch(
    shop: impl Future<Output = everbus_core::Result<()>>,
    steps: &mut UnboundedReceiver<Step>,
    output: &mut Output,
) -> Outcome {
    let mut shop = Box::pin(shop);
    loop {
        tokio::select! {
            Some(step) = steps.recv() => print(&step, output)?,
            closed = &mut shop => {
                while let Ok(step) = steps.try_recv() {
                    print(&step, output)?;
                }
                return Ok(closed?);
            }
        }
    }
}

fn print(step: &Step, output: &mut Output) -> Outcome {
    if output.is_json() {
        output.json(step)?;
    } else {
        #[allow(clippy::cast_precision_loss, reason = "seconds of a demo")]
        let seconds = step.at_ms as f64 / 1000.0;
        output.line(format!(
            "{seconds:5.2} s  {:<8}  {}  {}",
            step.who,
            step.order,
            escaped(&step.text)
        ))?;
    }
    output.flush()
}

async fn summarise(bus: &Bus, output: &mut Output) -> Outcome {
    let groups = bus.groups().await?;
    let dead = bus.dead_letters().list().await?;
    let published = bus.log()?.head().await?.progress();
    if output.is_json() {
        return output.json(&json!({
            "file": FILE,
            "published": published,
            "groups": groups,
            "dead_letters": dead,
        }));
    }
    output.line(format!(
        "\n{} published, none lost: all handled by every group that wants them, except {} that \
         waits for you.",
        counted(published, "event"),
        counted(dead.len() as u64, "dead letter")
    ))?;
    match dead.first() {
        Some(letter) => what_next(letter.event().id(), output),
        None => Ok(()),
    }
}

fn what_next(dead: EventId, output: &mut Output) -> Outcome {
    let me = invocation();
    output.line("\nWhat to type next:\n")?;
    let commands = [
        ("dlq list".to_owned(), "what failed for good"),
        (format!("dlq show {dead}"), "why, with every attempt"),
        (format!("dlq retry {dead}"), "send it back to payment"),
        (
            "tail --group payment --no-follow".to_owned(),
            "be payment: show it, and it counts as handled",
        ),
        ("groups".to_owned(), "how far every group is"),
        (
            "tail --from first --no-follow".to_owned(),
            "everything in the file",
        ),
    ];
    for (command, why) in commands {
        output.line(format!("  # {why}\n  {me} --db {FILE} {command}"))?;
    }
    Ok(())
}

/// How this program was called, so that suggested commands work as they are.
fn invocation() -> &'static str {
    let by_cargo = std::env::var_os("CARGO_PKG_NAME").is_some_and(|name| name == "everbus-cli");
    match (by_cargo, cfg!(debug_assertions)) {
        (true, false) => "cargo run --release --",
        (true, true) => "cargo run --",
        (false, _) => "everbus",
    }
}

fn euros(cents: i64) -> String {
    let sign = if cents < 0 { "-" } else { "" };
    let cents = cents.unsigned_abs();
    format!("{sign}€{}.{:02}", cents / 100, cents % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_written_as_money() {
        assert_eq!(euros(4150), "€41.50");
        assert_eq!(euros(-505), "-€5.05");
    }
}
