//! JSON pointers (RFC 6901), with `*` as a wildcard for one step.

/// One step of a pointer, unescaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PointerStep {
    /// `*`, which matches every key and index.
    Wildcard,
    /// The key of a map or the index of a list.
    Key(String),
}

/// Parses a pointer. Returns `None` if it is invalid. The empty pointer names the whole document.
pub(crate) fn parse(pointer: &str) -> Option<Vec<PointerStep>> {
    if pointer.is_empty() {
        return Some(Vec::new());
    }
    let unescape = |step: &str| match step {
        "*" => PointerStep::Wildcard,
        step => PointerStep::Key(step.replace("~1", "/").replace("~0", "~")),
    };
    Some(
        pointer
            .strip_prefix('/')?
            .split('/')
            .map(unescape)
            .collect(),
    )
}

/// Escapes one step.
pub(crate) fn escape(step: &str) -> String {
    step.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_step_is_read_as_it_was_written(step in "[^*]{0,12}") {
            let parsed = parse(&format!("/{}", escape(&step)));
            prop_assert_eq!(parsed, Some(vec![PointerStep::Key(step)]));
        }
    }

    #[test]
    fn relative_pointer_is_rejected() {
        assert_eq!(parse("spec/replicas"), None);
        assert_eq!(parse(""), Some(Vec::new()));
        let steps = parse("/webhooks/*/x").unwrap();
        assert_eq!(steps[1], PointerStep::Wildcard);
    }
}
