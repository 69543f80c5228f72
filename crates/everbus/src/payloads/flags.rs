//! Detects what a payload stage contains, as the *omni* specification does, so that stages can be filtered
//! without decompressing them.

/// A longer text may contain base64. JavaScript counts UTF-16 units, and so does this code.
const LONG: usize = 10_000;

const MEDIA: [&[u8]; 9] = [
    b"jpg", b"jpeg", b"png", b"gif", b"webp", b"mp4", b"mp3", b"ogg", b"pdf",
];

/// The text includes `base64`, or is longer than 10,000 UTF-16 units.
pub(super) fn contains_base64(text: &str) -> bool {
    text.contains("base64") || (text.len() > LONG && text.encode_utf16().count() > LONG)
}

/// `/https?:\/\/[^\s"]+\.(jpg|jpeg|png|gif|webp|mp4|mp3|ogg|pdf)/i`, in one pass: the characters after the
/// slashes form one run, and an address inside a run matches only if the whole run matches.
pub(super) fn contains_media(text: &str) -> bool {
    let mut rest = text;
    while let Some(at) = find_scheme(rest) {
        let run = &rest[at..];
        let end = run
            .find(|c: char| c == '"' || is_space(c))
            .unwrap_or(run.len());
        if has_media_ending(&run.as_bytes()[..end]) {
            return true;
        }
        rest = &run[end..];
    }
    false
}

/// The end of the first `http://` or `https://`.
fn find_scheme(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut from = 0;
    while let Some(colon) = text[from..].find("://").map(|at| from + at) {
        let before = &bytes[..colon];
        let ends = |scheme: &[u8]| {
            let at = before.len().checked_sub(scheme.len());
            at.is_some_and(|at| before[at..].eq_ignore_ascii_case(scheme))
        };
        if ends(b"http") || ends(b"https") {
            return Some(colon + 3);
        }
        from = colon + 3;
    }
    None
}

/// Whether some text, a dot and a known ending follow each other.
fn has_media_ending(run: &[u8]) -> bool {
    let dots = (1..run.len()).filter(|at| run[*at] == b'.');
    dots.map(|at| &run[at + 1..]).any(|after| {
        MEDIA.iter().any(|ending| {
            let start = after.get(..ending.len());
            start.is_some_and(|start| start.eq_ignore_ascii_case(ending))
        })
    })
}

/// `\s` of JavaScript.
fn is_space(c: char) -> bool {
    c == '\u{feff}' || (c.is_whitespace() && c != '\u{85}')
}

#[cfg(test)]
mod tests {
    use super::*;

    // conformance: omni/payload-contains-media: contains_media is detected by the address of a picture, film, sound or document, as the specification does
    #[test]
    fn media_are_found_by_their_addresses() {
        for text in [
            r#"{"url":"https://cdn.example/a.jpg"}"#,
            r#""HTTP://X.Y/Z.PDF""#,
            r#""http://x/y.jpeg?size=3""#,
            r#""https://a.b/c.mp4x""#,
            r#""http://a http://b.ogg""#,
            r#""http://https://x.webp""#,
            r#""http://ä/ö.png""#,
            r#""http://..gif""#,
            "\"http://a\u{85}.mp3\"",
        ] {
            assert!(contains_media(text), "{text}");
        }
        for text in [
            "",
            r#""photo.jpg""#,
            r#""ftp://x/y.jpg""#,
            r#""https://x/y z.jpg""#,
            r#""https://x/y","z.jpg""#,
            r#""https://.jpg""#,
            r#""https://x/jpg""#,
            r#""https://x.jpe g""#,
            r#""htp://x.jpg""#,
            r#""http:/x.jpg""#,
            r#""://x.jpg""#,
            "\"https://x\u{a0}.jpg\"",
            "\"https://x\u{feff}.jpg\"",
        ] {
            assert!(!contains_media(text), "{text}");
        }
    }

    // conformance: omni/payload-contains-base64: contains_base64 is set if the text includes base64 or is longer than 10,000
    #[test]
    fn base64_is_named_or_the_text_is_long() {
        assert!(contains_base64(r#"{"encoding":"base64"}"#));
        assert!(!contains_base64(r#"{"encoding":"Base64"}"#));
        assert!(!contains_base64(&"x".repeat(10_000)));
        assert!(contains_base64(&"x".repeat(10_001)));
        // Two bytes in UTF-8, one unit in UTF-16; four bytes, two units.
        assert!(!contains_base64(&"ä".repeat(10_000)));
        assert!(contains_base64(&"😀".repeat(5_001)));
        assert!(!contains_base64(&"😀".repeat(5_000)));
    }
}
