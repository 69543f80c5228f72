//! Tools for the tests of programs that use Everbus: direct calls of handlers, a bus with virtual time, and
//! an engine that delivers every event twice.
//!
//! - [`call`] runs one handler, without a bus.
//! - [`TestBus`] takes events through the whole pipeline. Time stands still until it is moved.
//! - [`Duplicator`] delivers every event twice, to find handlers that are not idempotent.
//!
//! ```
//! use everbus::testing::TestBus;
//! use everbus::{Event, Payload, Router};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize, Event)]
//! #[event(type = "orders.order.placed")]
//! struct OrderPlaced { order: u64 }
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize, Event)]
//! #[event(type = "mail.confirmation.sent")]
//! struct ConfirmationSent { order: u64 }
//!
//! async fn confirm(Payload(placed): Payload<OrderPlaced>) -> ConfirmationSent {
//!     ConfirmationSent { order: placed.order }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> everbus::Result<()> {
//! let bus = TestBus::new(Router::new().on("orders.order.placed", confirm)).await?;
//! bus.publish(OrderPlaced { order: 42 }).await?.assert_handled();
//! assert_eq!(bus.assert_published::<ConfirmationSent>(), ConfirmationSent { order: 42 });
//! # Ok(())
//! # }
//! ```

mod builder;
mod bus;
mod call;
mod control;
mod duplicator;
mod idle;
mod journal;
mod published;
mod report;
mod tap;

pub use builder::TestBusBuilder;
pub use bus::TestBus;
pub use call::{Call, call};
pub use duplicator::Duplicator;
pub use report::{Fate, Happened, Report};
