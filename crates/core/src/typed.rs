//! Typed events: a Rust type that is the payload of one event type, and decoding it.

use serde::{Deserialize, Serialize};

use crate::builder::EventBuilder;
use crate::error::{Code, Error, Result};
use crate::event::Event;

/// A Rust type that is the payload of one event type in one version.
///
/// Usually derived with `#[derive(Event)]` of the crate `everbus`, which makes the value publishable as
/// well. A manual implementation is enough for [`Event::typed`]:
///
/// ```
/// use everbus_core::{Event, TypedEvent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct OrderPlaced {
///     order: u64,
/// }
///
/// impl TypedEvent for OrderPlaced {
///     const TYPE: &'static str = "orders.order.placed";
/// }
///
/// let event = Event::builder(OrderPlaced::TYPE)
///     .version(OrderPlaced::VERSION)
///     .json(&OrderPlaced { order: 42 })
///     .build()?;
/// assert_eq!(event.typed::<OrderPlaced>()?.order, 42);
/// # Ok::<(), everbus_core::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a typed event",
    label = "no event type is known for this",
    note = "add `#[derive(everbus::Event)]` and `#[event(type = \"domain.entity.action\")]` to it"
)]
pub trait TypedEvent: Serialize {
    /// The event type: 1 to 255 printable characters without `*` and `>`.
    const TYPE: &'static str;

    /// The version of the payload, 1 or more.
    const VERSION: u32 = 1;

    /// Begins the event of this value, with the settings of its attribute: to set an id, a correlation id,
    /// metadata.
    ///
    /// ```
    /// use everbus_core::{Event, TypedEvent};
    /// # #[derive(serde::Serialize)]
    /// # struct OrderPlaced { order: u64 }
    /// # impl TypedEvent for OrderPlaced { const TYPE: &'static str = "orders.order.placed"; }
    /// let event = OrderPlaced { order: 42 }.builder().foreign_id("order-42").build()?;
    /// assert_eq!(event.display_id(), "order-42");
    /// # Ok::<(), everbus_core::Error>(())
    /// ```
    fn builder(&self) -> EventBuilder {
        Event::builder(Self::TYPE).version(Self::VERSION).json(self)
    }

    /// The JSON Schema of the payload, if known.
    ///
    /// The derive fills it in for types that also derive `everbus::schemars::JsonSchema`. A manual one may
    /// use any draft, named by its `$schema`.
    fn schema() -> Option<serde_json::Value> {
        None
    }
}

impl Event {
    /// Decodes the payload into the Rust type of this event type and version.
    ///
    /// An event of another type or version is never parsed, even if its payload would fit: it is
    /// [`Code::InvalidPayloadError`], as is a payload that does not fit.
    pub fn typed<'a, T: TypedEvent + Deserialize<'a>>(&'a self) -> Result<T> {
        if self.event_type() != T::TYPE {
            return Err(self.not_readable_as::<T>("read it as its own type"));
        }
        if self.version() != T::VERSION {
            return Err(self.not_readable_as::<T>(
                "read other versions with json(), or publish the version that is read",
            ));
        }
        self.json()
    }

    fn not_readable_as<T: TypedEvent>(&self, hint: &str) -> Error {
        let what = format!(
            "the event {} is {:?} version {} and cannot be read as {:?} version {}",
            self.display_id(),
            self.event_type(),
            self.version(),
            T::TYPE,
            T::VERSION
        );
        Error::new(Code::InvalidPayloadError, what).hint(hint)
    }
}
