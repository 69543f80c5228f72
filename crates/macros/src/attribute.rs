//! Reading `#[event(…)]`: every mistake is reported at the place where it was made.

use syn::meta::ParseNestedMeta;
use syn::{Attribute, Data, DeriveInput, Error, Fields, LitInt, LitStr, Result, Token};

use crate::{suggest, type_name};

const KEYS: [&str; 5] = ["type", "version", "key", "tenant", "entity"];

/// The content of `#[event(…)]`.
pub(crate) struct EventAttribute {
    pub(crate) event_type: LitStr,
    pub(crate) version: u32,
    pub(crate) key: Option<LitStr>,
    pub(crate) tenant: Option<LitStr>,
    /// The kind, and the field with the id.
    pub(crate) entity: Option<(LitStr, LitStr)>,
}

#[derive(Default)]
struct Given {
    event_type: Option<LitStr>,
    version: Option<u32>,
    key: Option<LitStr>,
    tenant: Option<LitStr>,
    entity: Option<(LitStr, LitStr)>,
}

impl EventAttribute {
    pub(crate) fn read(input: &DeriveInput) -> Result<Self> {
        refuse_on_parts(&input.data)?;
        let mut given = Given::default();
        let mut last = None;
        for attribute in input.attrs.iter().filter(|a| is_event(a)) {
            attribute.parse_nested_meta(|meta| given.add(&meta))?;
            last = Some(attribute);
        }
        let Some(event_type) = given.event_type else {
            let missing =
                "the event type is missing: say #[event(type = \"domain.entity.action\")]";
            return Err(match last {
                Some(attribute) => Error::new_spanned(attribute, missing),
                None => Error::new_spanned(&input.ident, missing),
            });
        };
        Ok(Self {
            event_type,
            version: given.version.unwrap_or(1),
            key: given.key,
            tenant: given.tenant,
            entity: given.entity,
        })
    }
}

impl Given {
    fn add(&mut self, meta: &ParseNestedMeta<'_>) -> Result<()> {
        let name = meta
            .path
            .get_ident()
            .map(ToString::to_string)
            .unwrap_or_default();
        match name.as_str() {
            "type" => {
                let literal: LitStr = meta.value()?.parse()?;
                type_name::check(&literal.value())
                    .map_err(|what| Error::new(literal.span(), what))?;
                set(&mut self.event_type, literal, meta)
            }
            "version" => {
                let literal: LitInt = meta.value()?.parse()?;
                let version = literal.base10_parse().map_err(|e| {
                    Error::new(
                        literal.span(),
                        format!("a version is 1 to {}: {e}", u32::MAX),
                    )
                })?;
                if version == 0 {
                    return Err(Error::new(
                        literal.span(),
                        "versions begin at 1: leave the version out for the first one",
                    ));
                }
                set(&mut self.version, version, meta)
            }
            "key" => set(&mut self.key, meta.value()?.parse()?, meta),
            "tenant" => set(&mut self.tenant, meta.value()?.parse()?, meta),
            "entity" => set(&mut self.entity, entity(meta)?, meta),
            other => Err(meta.error(match suggest::nearest(other, KEYS) {
                Some(known) => format!("unknown key `{other}`: did you mean `{known}`?"),
                None => format!("unknown key: the known ones are {}", KEYS.join(", ")),
            })),
        }
    }
}

/// `entity("ORDER", "order_id")`.
fn entity(meta: &ParseNestedMeta<'_>) -> Result<(LitStr, LitStr)> {
    if !meta.input.peek(syn::token::Paren) {
        return Err(meta.error("an entity is a kind and a field: entity(\"ORDER\", \"order_id\")"));
    }
    let content;
    syn::parenthesized!(content in meta.input);
    let kind = content.parse()?;
    content.parse::<Token![,]>()?;
    let field = content.parse()?;
    content.parse::<Option<Token![,]>>()?;
    if content.is_empty() {
        Ok((kind, field))
    } else {
        Err(content.error("an entity is a kind and a field, nothing more"))
    }
}

fn set<T>(slot: &mut Option<T>, value: T, meta: &ParseNestedMeta<'_>) -> Result<()> {
    if slot.replace(value).is_some() {
        let name = meta.path.get_ident().map(ToString::to_string);
        let what = format!("`{}` is given twice", name.unwrap_or_default());
        return Err(Error::new_spanned(&meta.path, what));
    }
    Ok(())
}

fn is_event(attribute: &Attribute) -> bool {
    attribute.path().is_ident("event")
}

/// Refuses the attribute on fields and variants. The compiler accepts it there, but it would have no effect.
fn refuse_on_parts(data: &Data) -> Result<()> {
    let refuse = |attributes: &[Attribute]| match attributes.iter().find(|a| is_event(a)) {
        Some(attribute) => Err(Error::new_spanned(
            attribute,
            "#[event(…)] belongs on the type, not inside it",
        )),
        None => Ok(()),
    };
    let in_fields = |fields: &Fields| fields.iter().try_for_each(|f| refuse(&f.attrs));
    match data {
        Data::Struct(data) => in_fields(&data.fields),
        Data::Enum(data) => data.variants.iter().try_for_each(|variant| {
            refuse(&variant.attrs)?;
            in_fields(&variant.fields)
        }),
        Data::Union(_) => Ok(()),
    }
}
