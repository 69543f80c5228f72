//! Edit and retry: a corrected event takes the place of a dead letter. The engine half is `DeadLetters::replace`.

use bytes::Bytes;
use everbus_core::{Code, DeadLetter, Error, Event, Result};

use super::DeadLetterQueue;
use crate::audit::Action;
use crate::runtime::receipt::{About, Receipt};

impl DeadLetterQueue {
    /// Publishes an event with a corrected payload instead of a dead letter, for the group that gave up on
    /// it and no other. It is a new event at the end of the log that names the original (metadata
    /// `edit_of`). The dead letter is kept, is no longer open, and names the new event
    /// ([`DeadLetter::replaced_by`]).
    ///
    /// The payload is checked like the payload of a publish: its size, and its schema if there is one.
    /// `NotFound` if the dead letter is no longer open.
    pub async fn edit(&self, letter: &DeadLetter, payload: impl Into<Bytes>) -> Result<Receipt> {
        let corrected = self.corrected(letter, payload)?;
        self.replace(letter, corrected).await
    }

    /// The event that [`edit`](Self::edit) would publish: checked, not published.
    pub fn corrected(&self, letter: &DeadLetter, payload: impl Into<Bytes>) -> Result<Event> {
        let corrected = letter.corrected(payload)?;
        self.shared.check_event(&corrected, None)?;
        Ok(corrected)
    }

    /// Publishes this event instead of a dead letter, as [`edit`](Self::edit) does. It must have the type
    /// and the tenant of the original, and a different id.
    pub async fn replace(&self, letter: &DeadLetter, corrected: Event) -> Result<Receipt> {
        self.shared.accepts()?;
        self.shared.check_event(&corrected, None)?;
        let action = Action::new("dlq.edit")
            .on("EVENT", &letter.event().id())
            .detail("group", letter.group.to_string().into())
            .detail("replaced_by", corrected.id().to_string().into());
        let letters = self.letters()?;
        let mut receipt = None;
        let work = async {
            // A payload that is too large for the log goes to the object store first, as in a publish.
            let mut moved = self.shared.offload(vec![corrected]).await?;
            let corrected = moved.pop().ok_or_else(no_answer)?;
            let about = About::of(&corrected);
            let replaced = letters.replace(letter.key(), corrected);
            let appended = self.shared.unless_ending(replaced).await?;
            receipt = Some(Receipt::new(appended, about, self.shared.clone()));
            Ok(())
        };
        self.audited(action, work).await?;
        receipt.ok_or_else(no_answer)
    }
}

fn no_answer() -> Error {
    Error::new(Code::Internal, "the engine did not answer")
}
