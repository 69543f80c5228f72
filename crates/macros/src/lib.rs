//! `#[derive(Event)]`, which makes a serde type publishable as one type of event, and `#[debug_handler]`,
//! which shows why a function is not a handler.
//!
//! Use them as `everbus::Event` and `everbus::debug_handler`; the generated code names everything through `::everbus`, so that crate
//! must be a dependency under its own name.

mod attribute;
mod debug_handler;
mod expand;
mod suggest;
mod type_name;

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

/// Makes a serialisable type the payload of one event type.
///
/// It implements `everbus::TypedEvent` for the type, `everbus::IntoEvent` for the type and for a
/// reference to it, so that `bus.publish(value)` and `bus.publish(&value)` work, and
/// `everbus::IntoOutcome`, so that a handler can return the value to publish it. Nothing needs to be
/// imported, but the crate `everbus` must be a dependency under that name. The type must implement
/// `serde::Serialize`, and `serde::Deserialize` to be read with `Event::typed`.
///
/// In `#[event(…)]`:
///
/// | key | meaning |
/// |---|---|
/// | `type = "orders.order.placed"` | the event type, required: 1 to 255 printable characters without `*` and `>` |
/// | `version = 2` | the version of the payload, 1 unless given |
/// | `key = "field"` | the field that is the ordering key |
/// | `tenant = "field"` | the field that is the tenant |
/// | `entity("ORDER", "field")` | the kind of thing the event is about, and the field that says which one |
///
/// The text of these fields comes from `Display`. The fields stay in the payload as well.
///
/// # JSON Schema
///
/// If the type derives `JsonSchema` too, `TypedEvent::schema` gives its JSON Schema (draft 7, of what
/// the type reads). A type without `JsonSchema` has no schema, which is not an error. `JsonSchema` must be the one of
/// `everbus::schemars`, or of the same major version:
///
/// ```text
/// #[derive(Serialize, Deserialize, everbus::schemars::JsonSchema, everbus::Event)]
/// #[event(type = "orders.order.placed")]
/// #[schemars(crate = "everbus::schemars")]
/// struct OrderPlaced {
///     order_id: u64,
/// }
/// ```
///
/// A generic type has a schema only if its own bounds say that its parameters have one
/// (`struct Changed<T: JsonSchema>`).
#[proc_macro_derive(Event, attributes(event))]
pub fn derive_event(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand::expand(&input)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}

/// Shows which part of an async function keeps it from being a handler. It changes nothing else.
///
/// Without it the compiler only says that the function is not a handler. With it, the error points at the parameter
/// that cannot be taken from an event, at the result that a handler cannot return, or at the value that keeps the
/// future from being `Send`.
///
/// ```text
/// #[everbus::debug_handler]
/// async fn confirm(order: OrderPlaced, State(mailer): State<Mailer>) { … }
///                         ^^^^^^^^^^^ `OrderPlaced` cannot be taken from an event
/// ```
///
/// It is for free functions without type parameters: not for methods, closures and generic functions.
#[proc_macro_attribute]
pub fn debug_handler(arguments: TokenStream, function: TokenStream) -> TokenStream {
    debug_handler::expand(&arguments.into(), &function.into()).into()
}
