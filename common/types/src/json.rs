//! Size of a value as JSON, and which fields it leaves out.

use std::io::{self, Write};

use serde::Serialize;

/// Returns whether a field is not written because it has its default value.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Returns the size of a value in bytes of JSON.
pub fn size(value: &impl Serialize) -> usize {
    #[derive(Default)]
    struct ByteCounter(usize);
    impl Write for ByteCounter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut counter = ByteCounter::default();
    // Serialization into a counter does not fail.
    if serde_json::to_writer(&mut counter, value).is_err() {
        return usize::MAX;
    }
    counter.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn size_is_that_of_the_text() {
        assert_eq!(size(&json!({"a": "b"})), r#"{"a":"b"}"#.len());
    }
}
