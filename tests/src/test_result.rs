//! The result of a test, and an assertion about texts. An error panics at its `?`, so the message names the line, and
//! processes keep their logs.

use std::fmt::{self, Debug, Display, Formatter};

pub type TestResult<T = ()> = Result<T, Failed>;

/// The error type of a test. No value of it exists.
pub enum Failed {}

impl Debug for Failed {
    fn fmt(&self, _: &mut Formatter<'_>) -> fmt::Result {
        match *self {}
    }
}

impl<E: Display> From<E> for Failed {
    #[track_caller]
    fn from(error: E) -> Self {
        panic!("{error:#}")
    }
}

/// Asserts that the text contains each of these parts.
#[macro_export]
macro_rules! assert_contains {
    ($text:expr, $($part:expr),+ $(,)?) => {{
        let text: &str = &$text;
        $({
            let part: &str = &$part;
            assert!(text.contains(part), "{part:?} is missing in: {text}");
        })+
    }};
}
