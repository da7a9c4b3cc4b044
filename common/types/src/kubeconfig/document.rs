//! Parses bytes into one bounded YAML document. Messages contain a position and a class, never content.

use serde_json::Value;
use serde_saphyr::Error;

use super::{KubeconfigError, SIZE_MAX};

/// Enough for some hundred contexts. Aliases are limited more strictly, as they multiply the nodes that they repeat.
const NODES_MAX: usize = 20_000;
const DEPTH_MAX: usize = 32;
const ALIASES_MAX: usize = 16;
const REPLAYED_EVENTS_MAX: usize = 128;

pub(super) fn parse(bytes: &[u8]) -> Result<Value, KubeconfigError> {
    if bytes.len() > SIZE_MAX {
        return Err(KubeconfigError::TooLarge { size: bytes.len() });
    }
    let text = std::str::from_utf8(bytes).map_err(|error| KubeconfigError::NotUtf8 {
        position: error.valid_up_to(),
    })?;
    if let Some(position) = text.find('\0') {
        return Err(KubeconfigError::Nul { position });
    }
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_nodes: NODES_MAX,
            max_events: 4 * NODES_MAX,
            max_depth: DEPTH_MAX,
            flow_nesting_limit: DEPTH_MAX,
            // A second document has its own error message.
            max_documents: 2,
            max_anchors: ALIASES_MAX,
            max_aliases: ALIASES_MAX,
            max_merge_keys: ALIASES_MAX,
            max_inclusion_depth: 0,
            max_recorded_anchor_events: REPLAYED_EVENTS_MAX,
            max_recorded_anchor_bytes: SIZE_MAX,
            max_total_scalar_bytes: 4 * SIZE_MAX,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: REPLAYED_EVENTS_MAX,
            max_replay_stack_depth: 4,
        },
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::Error,
        strict_booleans: true,
        emit_comments: false,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| yaml_error(&error))
}

fn yaml_error(error: &Error) -> KubeconfigError {
    let (line, column) = error
        .location()
        .map_or((0, 0), |location| (location.line(), location.column()));
    KubeconfigError::Yaml {
        line,
        column,
        problem: problem(error),
    }
}

fn problem(error: &Error) -> &'static str {
    match error {
        Error::WithSnippet { error, .. } | Error::AliasError { error, .. } => problem(error),
        Error::MultipleDocuments { .. } => "it contains more than one YAML document",
        Error::DuplicateMappingKey { .. } => "it contains a key twice",
        Error::Eof { .. } => "it is empty",
        Error::Budget { .. }
        | Error::AliasReplayCounterOverflow { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => {
            "it has too many or too deeply nested nodes, anchors or aliases"
        }
        _ => "it is not valid YAML",
    }
}
