//! Selects the functions that read and write the envelope of a dialect.

use everbus_core::{Event, Result};

use crate::Beside;
use crate::dialect::Dialect;
use crate::draft::Draft;
use crate::fields::Fields;
use crate::{cloudevents, framework, native, omni, outbox, workflow};

/// Reads the envelope from the fields of a document.
pub(crate) fn read(fields: &Fields<'_>, beside: &Beside<'_>) -> Result<Draft> {
    match fields.dialect() {
        Dialect::Native => native::read(fields, beside),
        Dialect::CloudEvents => cloudevents::read(fields, beside),
        Dialect::Omni => omni::read(fields, beside),
        Dialect::Workflow => workflow::read(fields, beside),
        Dialect::Outbox => outbox::read(fields, beside),
        Dialect::Framework => framework::read(fields, beside),
    }
}

/// The fields of an event, without the payload.
pub(crate) fn write(event: &Event, dialect: Dialect) -> Result<Fields<'_>> {
    let mut fields = Fields::new(dialect);
    match dialect {
        Dialect::Native => native::write(event, &mut fields),
        Dialect::CloudEvents => cloudevents::write(event, &mut fields),
        Dialect::Omni => omni::write(event, &mut fields)?,
        Dialect::Workflow => workflow::write(event, &mut fields)?,
        Dialect::Outbox => outbox::write(event, &mut fields),
        Dialect::Framework => framework::write(event, &mut fields),
    }
    Ok(fields)
}
