//! JSON pointers (RFC 6901), with `*` as a wildcard for one step.

/// One step of a pointer, unescaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Any,
    Of(String),
}

/// Parses a pointer. Returns `None` if it is invalid. The empty pointer names the whole document.
pub(crate) fn steps(pointer: &str) -> Option<Vec<Step>> {
    if pointer.is_empty() {
        return Some(Vec::new());
    }
    let read = |step: &str| match step {
        "*" => Step::Any,
        step => Step::Of(step.replace("~1", "/").replace("~0", "~")),
    };
    Some(pointer.strip_prefix('/')?.split('/').map(read).collect())
}

/// Escapes one step.
pub(crate) fn escaped(step: &str) -> String {
    step.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_step_is_read_as_it_was_written(step in "[^*]{0,12}") {
            let read = steps(&format!("/{}", escaped(&step)));
            prop_assert_eq!(read, Some(vec![Step::Of(step)]));
        }
    }

    #[test]
    fn relative_pointer_is_rejected() {
        assert_eq!(steps("spec/replicas"), None);
        assert_eq!(steps(""), Some(Vec::new()));
        let any = steps("/webhooks/*/x").unwrap();
        assert_eq!(any[1], Step::Any);
    }
}
