//! The rules for event types, checked while the program compiles.
//!
//! They repeat `everbus_core::builder::validate_type`, because with a dependency on the core every build would
//! compile the core twice. A test compares the two.

const MAX_CHARS: usize = 255;

pub(crate) fn check(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("the event type is empty: say for example \"orders.order.placed\"".to_owned());
    }
    let length = name.chars().count();
    if length > MAX_CHARS {
        return Err(format!(
            "the event type has {length} characters: at most {MAX_CHARS} are allowed"
        ));
    }
    for c in name.chars() {
        if matches!(c, '*' | '>') {
            return Err(format!(
                "the event type contains `{c}`, which is for patterns: an event has one exact type"
            ));
        }
        if is_unprintable(c) {
            return Err(format!(
                "the event type contains {c:?}: only printable characters are allowed"
            ));
        }
    }
    Ok(())
}

fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::check;
    use everbus_core::builder::validate_type;

    #[test]
    fn the_macro_and_the_builder_refuse_the_same_types() {
        let every_char = ('\0'..=char::MAX).map(|c| format!("a{c}b"));
        let lengths = [0, 1, 254, 255, 256].map(|n| "ä".repeat(n));
        for name in every_char.chain(lengths) {
            assert_eq!(
                check(&name).is_ok(),
                validate_type(&name).is_ok(),
                "{name:?}"
            );
        }
    }
}
