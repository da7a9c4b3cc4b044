//! Limits the length of texts.

/// Cuts a text to at most `max` bytes, at a character boundary, and releases the rest of its memory.
pub fn truncate(text: &mut String, max: usize) {
    if text.len() > max {
        text.truncate(text.floor_char_boundary(max));
    }
    text.shrink_to_fit();
}

/// Returns the text after [`truncate`].
#[must_use]
pub fn truncated(mut text: String, max: usize) -> String {
    truncate(&mut text, max);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_text_releases_its_memory() {
        let mut text = "a".repeat(1 << 20);
        truncate(&mut text, 3);
        assert_eq!(text, "aaa");
        assert!(text.capacity() < 64, "{}", text.capacity());
    }

    #[test]
    fn long_text_is_truncated_at_character_boundary() {
        assert_eq!(truncated("äää".to_owned(), 3), "ä");
    }
}
