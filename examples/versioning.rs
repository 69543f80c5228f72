//! Versions of an event: an old one is upcast, an unknown one waits in the dead letters for a deployment.
//!
//! Run it with `cargo run -p everbus-examples --bin versioning`. It works on a temporary file.

use std::time::Duration;

use everbus::{Bus, Event, Payload, Router};
use serde::{Deserialize, Serialize};

/// Version 1: one field for the name.
#[derive(Serialize, Deserialize, Event)]
#[event(type = "users.user.registered")]
struct RegisteredV1 {
    name: String,
}

/// Version 2: first and last name.
#[derive(Serialize, Deserialize, Event)]
#[event(type = "users.user.registered", version = 2)]
struct RegisteredV2 {
    first: String,
    last: String,
}

/// Version 3, of next week: with a country.
#[derive(Serialize, Deserialize, Event)]
#[event(type = "users.user.registered", version = 3)]
struct RegisteredV3 {
    first: String,
    last: String,
    country: String,
}

fn v1_to_v2(RegisteredV1 { name }: RegisteredV1) -> RegisteredV2 {
    let (first, last) = name.split_once(' ').unwrap_or((&name, ""));
    RegisteredV2 {
        first: first.to_owned(),
        last: last.to_owned(),
    }
}

fn v2_to_v3(old: RegisteredV2) -> RegisteredV3 {
    let RegisteredV2 { first, last } = old;
    RegisteredV3 {
        first,
        last,
        country: "unknown".to_owned(),
    }
}

/// What runs today: version 2, and version 1 through an upcast.
fn today() -> Router {
    async fn greet(Payload(user): Payload<RegisteredV2>) {
        println!("  welcome, {} ({})", user.first, user.last);
    }
    Router::new()
        .group("welcome")
        .on("users.user.registered", greet)
        .upcast(v1_to_v2)
}

/// What is deployed next: version 3, and the older ones step by step.
fn next_week() -> Router {
    async fn greet(Payload(user): Payload<RegisteredV3>) {
        println!(
            "  welcome, {} ({}) from {}",
            user.first, user.last, user.country
        );
    }
    Router::new()
        .group("welcome")
        .on("users.user.registered", greet)
        .upcast(v1_to_v2)
        .upcast(v2_to_v3)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("users.db").display().to_string();

    println!("Today's program reads version 2. It gets all three:");
    let bus = Bus::open(&file).await?;
    bus.mount(today()).await?;
    bus.start().await?;
    let v1 = RegisteredV1 {
        name: "Ada Lovelace".to_owned(),
    };
    bus.publish(v1).await?.settled().await?;
    let v2 = RegisteredV2 {
        first: "Alan".to_owned(),
        last: "Turing".to_owned(),
    };
    bus.publish(v2).await?.settled().await?;
    // Another service was deployed earlier and publishes version 3 already.
    let v3 = RegisteredV3 {
        first: "Grace".to_owned(),
        last: "Hopper".to_owned(),
        country: "USA".to_owned(),
    };
    let receipt = bus.publish(v3).await?;
    receipt.settled().await?;
    for letter in bus.dead_letters().list().await? {
        let id = letter.event().id().to_string();
        println!(
            "  dead letter of {}: {}",
            letter.group,
            letter.last_error().replace(&id, "…")
        );
        println!(
            "  after {} attempt: a retry would not change the version",
            letter.attempts
        );
    }
    bus.shutdown().await?;

    println!("\nNext week's program reads version 3. The dead letter is retried:");
    let bus = Bus::open(&file).await?;
    bus.mount(next_week()).await?;
    bus.start().await?;
    bus.dead_letters().retry(receipt.id()).await?;
    // The receipt belongs to the previous bus; this bus's engine can wait for the event as well.
    bus.engine()
        .settled()?
        .settled(receipt.position(), Duration::from_secs(30))
        .await?;
    let v1 = RegisteredV1 {
        name: "Edsger Dijkstra".to_owned(),
    };
    bus.publish(v1).await?.settled().await?;
    println!(
        "  {} dead letters are left",
        bus.dead_letters().list().await?.len()
    );
    bus.shutdown().await?;
    Ok(())
}
