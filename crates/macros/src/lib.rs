//! `#[derive(Event)]`, which makes a serde type publishable as one type of event.
//!
//! Use it as `everbus::Event`; the generated code names everything through `::everbus`, so that crate
//! must be a dependency under its own name.

mod attribute;
mod expand;
mod suggest;
mod type_name;

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

/// Makes a serialisable type the payload of one event type.
///
/// It implements `everbus::TypedEvent` for the type, and `everbus::IntoEvent` for the type and for a
/// reference to it, so that `bus.publish(value)` and `bus.publish(&value)` work. Nothing needs to be
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
/// The fields named are shown with `Display`. They stay in the payload as well.
#[proc_macro_derive(Event, attributes(event))]
pub fn derive_event(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand::expand(&input)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}
