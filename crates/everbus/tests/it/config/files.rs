//! What is no configuration at all: binary, empty, endless, or made by chance.

use everbus::config::Problems;
use everbus::{Code, Config};

use super::{SPECIFICATION, parse, problems, refused};

// conformance: handlers/config-not-a-file: a file that is missing, empty, binary, too large or not YAML is refused before any event moves
#[test]
fn what_is_no_configuration_file_is_refused() {
    for (text, said) in [
        ("", "the file is empty"),
        (" \n\n", "the file is empty"),
        ("\u{feff}", "the file is empty"),
        ("# nothing\n  # at all\n", "only comments"),
        ("---\n...\n", "says nothing"),
        ("a: 1\n---\nb: 2\n", "second document"),
        ("broker: {type: memory\n", "not YAML"),
        ("broker: *x\n", "not YAML"),
        ("bro\0ker", "NUL"),
        ("\u{feff}broker: {type: memory\n", "not YAML"),
    ] {
        let problems = problems(text);
        assert!(problems[0].contains(said), "{text:?}: {problems:?}");
    }
    assert!(parse("\u{feff}broker: {type: memory}\r\n").is_ok());

    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(at(name), bytes).unwrap();
        at(name)
    };
    let huge = at("huge.yaml");
    let file = std::fs::File::create(&huge).unwrap();
    // Nothing of it is on the disk, and nothing of it is read.
    file.set_len(1 << 40).unwrap();
    let comment = |n: usize| {
        [
            b"#".as_slice(),
            &vec![b'x'; n],
            b"\nbroker: {type: memory}\n",
        ]
        .concat()
    };
    let too_large = write("too-large.yaml", &comment(1024 * 1024));
    for (path, said) in [
        (at("missing.yaml"), "missing.yaml: there is no such file"),
        (directory.path().to_owned(), "this is a directory"),
        (huge, "larger than 1 MiB"),
        (too_large, "larger than 1 MiB"),
        // What is read of it ends inside a character.
        (
            write("umlauts.yaml", "ä".repeat(600_000).as_bytes()),
            "umlauts.yaml: the file is larger than 1 MiB",
        ),
        (
            write("nul.yaml", b"broker:\n  \0"),
            "nul.yaml:2:3: this is not a text: there is a NUL byte",
        ),
        (
            write("latin.yaml", b"# gr\xfc\xdfe\nbroker: {type: memory}\n"),
            "latin.yaml:1:5: this is not a text: there is a byte that is not UTF-8",
        ),
        (
            write("elf.yaml", b"\x7fELF\x02\x01\x01\0\0\0\xff"),
            "not a text",
        ),
        (write("empty.yaml", b""), "empty.yaml: the file is empty"),
        (
            write("bad.yaml", b"broker: {type: memory\n"),
            "bad.yaml:2:1: ",
        ),
    ] {
        let error = Config::load(&path).unwrap_err();
        assert_eq!(error.code(), Code::InvalidConfig, "{error}");
        assert!(error.message().contains(said), "{said} in {error}");
        assert!(error.hint_text().is_some());
    }
    let good = write("good.yaml", &comment(1024 * 1024 - 100));
    assert_eq!(
        Config::load(good).unwrap().broker_url().as_deref(),
        Some("memory:")
    );
}

// conformance: handlers/config-aliases: aliases may repeat a value, and cannot blow up or nest without end
#[test]
fn aliases_repeat_values_and_cannot_blow_up() {
    let config = parse(
        "
consumers:
  a: {stream: a.a, retry: &patient {max_attempts: 9, backoff_max: 1m}}
  b: {stream: b.b, retry: *patient}
",
    )
    .unwrap();
    assert_eq!(config.consumers[0].retry, config.consumers[1].retry);
    assert_eq!(config.consumers[1].retry.unwrap().max_attempts, Some(9));
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for n in 1..30 {
        let ten = vec![format!("*a{}", n - 1); 10].join(", ");
        laughs.push_str(&format!("a{n}: &a{n} [{ten}]\n"));
    }
    refused(&laughs, "", "more than 100000 values");
    for deep in [
        "- ".repeat(400_000),
        "[".repeat(400_000),
        "{a: ".repeat(200_000),
    ] {
        refused(&deep, "1:", "levels deep");
    }
}

/// A small generator of pseudo-random numbers, so that a seed repeats a run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n as u64).unwrap()
    }
}

// conformance: handlers/config-fuzz: whatever a file contains, reading it ends in a configuration or in InvalidConfig
#[test]
fn whatever_a_file_contains_it_is_read_or_refused() {
    let seed = std::env::var("EVERBUS_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| {
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
            now.as_nanos() as u64 | 1
        });
    eprintln!("EVERBUS_TEST_SEED={seed}");
    let mut random = Random(seed);
    let pieces = [
        ":",
        "\n",
        " ",
        "  ",
        "\t",
        "-",
        "[",
        "]",
        "{",
        "}",
        "\"",
        "'",
        "#",
        "&a ",
        "*a",
        "!x ",
        "? ",
        "|",
        ">",
        "%",
        "---\n",
        "...",
        "${",
        "}",
        "$",
        "0",
        "-1",
        "1e999",
        ".nan",
        "ä",
        "\u{feff}",
        "\u{2028}",
        "\\",
        ",",
        "null",
        "off",
        "<<: *a\n",
        "redis://",
        "9999999999999999999",
    ];
    let sample: Vec<char> = SPECIFICATION.chars().collect();
    let (mut read, mut refused) = (0, 0);
    for _ in 0..3000 {
        let mut text = sample.clone();
        for _ in 0..=random.below(4) {
            let at = random.below(text.len());
            let end = (at + random.below(12)).min(text.len());
            match random.below(4) {
                0 => drop(text.drain(at..end)),
                1 => {
                    let piece = pieces[random.below(pieces.len())];
                    text.splice(at..at, piece.chars());
                }
                2 => {
                    let copied: Vec<char> = text[at..end].to_vec();
                    let to = random.below(text.len());
                    text.splice(to..to, copied);
                }
                _ => {
                    let piece = pieces[random.below(pieces.len())];
                    text.splice(at..end, piece.chars());
                }
            }
            if text.is_empty() {
                text.push('a');
            }
        }
        let text: String = text.into_iter().collect();
        match parse(&text) {
            Ok(_) => read += 1,
            Err(error) => {
                refused += 1;
                assert_eq!(error.code(), Code::InvalidConfig, "{error}\n{text}");
                let problems = Problems::of(&error).expect("the cause");
                assert!(!problems.list.is_empty());
                let said = error.to_string();
                assert!(!said.contains("hunter2"), "{said}");
                assert!(said.lines().count() <= 22, "{said}");
            }
        }
    }
    // Both ways must be tried, or the mutations are worth nothing.
    assert!(
        read > 100 && refused > 500,
        "{read} read, {refused} refused"
    );
}
