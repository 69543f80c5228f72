//! The implementations that `#[derive(Event)]` writes.

use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::ext::IdentExt;
use syn::{Data, DeriveInput, Error, Fields, Ident, LitStr, Result, parse_quote};

use crate::attribute::EventAttribute;
use crate::suggest;

pub(crate) fn expand(input: &DeriveInput) -> Result<TokenStream> {
    let EventAttribute {
        event_type,
        version,
        key,
        tenant,
        entity,
    } = EventAttribute::read(input)?;
    let name = &input.ident;

    let mut attributes = TokenStream::new();
    if let Some(field) = key {
        let value = shown(input, "key", &field)?;
        attributes.extend(quote!(.key(#value)));
    }
    if let Some(field) = tenant {
        let value = shown(input, "tenant", &field)?;
        attributes.extend(quote!(.tenant(#value)));
    }
    if let Some((kind, field)) = entity {
        let value = shown(input, "entity", &field)?;
        attributes.extend(quote!(.entity(#kind, #value)));
    }

    let mut generics = input.generics.clone();
    let (_, types, _) = input.generics.split_for_impl();
    if !input.generics.params.is_empty() {
        // Whether a generic type is serialisable depends on its parameters.
        let serialisable = parse_quote!(#name #types: ::everbus::__private::Serialize);
        generics.make_where_clause().predicates.push(serialisable);
    }
    let (parameters, _, bounds) = generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #parameters ::everbus::TypedEvent for #name #types #bounds {
            const TYPE: &'static ::core::primitive::str = #event_type;
            const VERSION: ::core::primitive::u32 = #version;

            fn builder(&self) -> ::everbus::EventBuilder {
                ::everbus::Event::builder(#event_type)
                    .version(#version)
                    .json(self)
                    #attributes
            }

            fn schema() -> ::core::option::Option<::everbus::__private::Value> {
                // The compiler selects one of the two methods: it depends on whether the type has a schema.
                #[allow(unused_imports)]
                use ::everbus::__private::{KnownSchema as _, NoSchema as _};
                (&::everbus::__private::SchemaOf::<Self>::NEW).json_schema()
            }
        }

        #[automatically_derived]
        impl #parameters ::everbus::IntoEvent for &#name #types #bounds {
            fn into_event(self) -> ::everbus::Result<::everbus::Event> {
                ::everbus::TypedEvent::builder(self).build()
            }

            fn rust_type(&self) -> ::core::option::Option<&'static ::core::primitive::str> {
                ::core::option::Option::Some(::core::any::type_name::<#name #types>())
            }
        }

        #[automatically_derived]
        impl #parameters ::everbus::IntoEvent for #name #types #bounds {
            fn into_event(self) -> ::everbus::Result<::everbus::Event> {
                ::everbus::IntoEvent::into_event(&self)
            }

            fn rust_type(&self) -> ::core::option::Option<&'static ::core::primitive::str> {
                ::core::option::Option::Some(::core::any::type_name::<Self>())
            }
        }

        #[automatically_derived]
        impl #parameters ::everbus::IntoOutcome for #name #types #bounds {
            fn into_outcome(self) -> ::everbus::HandlerOutcome {
                ::everbus::__private::emit(self)
            }

            fn returns(returns: &mut ::everbus::Returns) {
                ::everbus::__private::emits::<Self>(returns);
            }
        }
    })
}

/// The text of a field that the attribute names. If the field does not implement `Display`, the compiler
/// points at that name.
fn shown(input: &DeriveInput, role: &str, field: &LitStr) -> Result<TokenStream> {
    let field_name = find(input, role, field)?;
    let here = Span::call_site().located_at(field.span());
    Ok(quote_spanned!(here=> ::std::string::ToString::to_string(&self.#field_name)))
}

fn find<'a>(input: &'a DeriveInput, role: &str, field: &LitStr) -> Result<&'a Ident> {
    let name = &input.ident;
    let refuse = |why| {
        let what = format!("`{role}` takes a named field of a struct, and `{name}` {why}");
        Err(Error::new(field.span(), what))
    };
    let fields = match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => &fields.named,
            Fields::Unnamed(_) | Fields::Unit => return refuse("has no named fields"),
        },
        Data::Enum(_) => return refuse("is an enum"),
        Data::Union(_) => return refuse("is a union"),
    };
    let wanted = field.value();
    let known = || fields.iter().filter_map(|f| f.ident.as_ref());
    known()
        .find(|known| known.unraw() == wanted)
        .ok_or_else(|| {
            let names: Vec<String> = known().map(|known| known.unraw().to_string()).collect();
            let advice = match suggest::nearest(&wanted, &names) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("it has {}", listed(&names)),
            };
            let what = format!("`{name}` has no field `{wanted}`: {advice}");
            Error::new(field.span(), what)
        })
}

fn listed(names: &[String]) -> String {
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}
