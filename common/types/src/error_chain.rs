//! Formats an error with all its causes for users.

use std::error::Error;

/// Limit for the text in bytes. A parser's error may quote its whole input.
pub const LONGEST: usize = 4096;

/// Returns `error: cause: cause of the cause` on one line, cut at [`LONGEST`].
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    shown(&text)
}

fn shown(text: &str) -> String {
    const CUT: char = '…';
    let mut shown = String::new();
    for c in text.chars() {
        let before = shown.len();
        match c.is_control() {
            true => shown.extend(c.escape_debug()),
            false => shown.push(c),
        }
        if shown.len() > LONGEST - CUT.len_utf8() {
            shown.truncate(before);
            shown.push(CUT);
            break;
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("writing failed")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn causes_follow_in_order() {
        let error = Outer(std::io::Error::other("disk full"));
        assert_eq!(chain(&error), "writing failed: disk full");
    }

    #[test]
    fn chain_is_bounded_and_has_no_control_characters() {
        let of = |text: String| chain(&std::io::Error::other(text));
        assert_eq!(of("a\nb\u{1b}".to_owned()), r"a\nb\u{1b}");
        let long = of("ä\n".repeat(9_000));
        assert!(
            long.len() <= LONGEST && long.ends_with('…'),
            "{}",
            long.len()
        );
    }
}
