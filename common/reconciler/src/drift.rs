//! Drift: what of a release is no longer as its chart has it. The apiserver is asked what a server-side
//! apply of the manifest would make of each object, and its answer is compared with what is there.
//!
//! So a field that helm does not set is nobody's business here, and neither is how a value is written.
//! What is found, ignored, held back and said are functions of values; `look` alone asks the apiserver.

pub(crate) mod difference;
mod field_owner;
mod heal_limit;
pub(crate) mod ignore;
pub(crate) mod json_pointer;
mod kinds;
pub(crate) mod look;
mod message;
mod object;
pub(crate) mod schedule;

use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::names::{DRIFT_ANNOTATION, DRIFT_IGNORE_ANNOTATION};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

pub(crate) use ignore::Rule;
pub(crate) use message::{described, findings_in, found, told, with_findings};
pub(crate) use object::ObjectId;

/// The name under which helm writes to objects, whatever its program is called.
pub(crate) const HELM: &str = "helm";

/// What is wanted of one release, now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    pub mode: DriftMode,
    pub interval_seconds: u32,
    pub rules: Vec<Rule>,
    /// What of the Tenant's annotations cannot be read, for people.
    pub mistaken: Option<String>,
}

impl Wanted {
    /// The fleet's policy, with what the Tenant's annotations change. One that cannot be read changes
    /// nothing, and is told.
    pub fn of<'a>(policy: &DriftPolicy, annotation: impl Fn(&str) -> Option<&'a str>) -> Self {
        let mut mistaken = Vec::new();
        let mode = annotation(DRIFT_ANNOTATION).map(|text| (text, text.parse()));
        let mode = match mode {
            None => policy.mode,
            Some((_, Ok(mode))) => mode,
            Some((text, Err(why))) => {
                mistaken.push(format!("annotation {DRIFT_ANNOTATION}: {text:?}: {why}"));
                policy.mode
            }
        };
        let (rules, wrong) = ignore::read(annotation(DRIFT_IGNORE_ANNOTATION).unwrap_or_default());
        if let Some(wrong) = wrong {
            mistaken.push(format!("annotation {DRIFT_IGNORE_ANNOTATION}: {wrong}"));
        }
        Self {
            mode,
            interval_seconds: policy.interval_seconds.clamp(1, 24 * 60 * 60),
            rules,
            mistaken: (!mistaken.is_empty()).then(|| mistaken.join("; ")),
        }
    }
}

/// What differs in one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// It is gone.
    Deleted,
    /// These fields, as JSON pointers. Never what is in them: it may be a secret.
    Fields(Vec<String>),
}

/// One object that is not as its chart has it, and what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub object: ObjectId,
    pub difference: Difference,
    /// Who else has written what differs, where that can be known.
    pub writer: Option<String>,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is told, and that is all that is wanted.
    Left,
    Healed,
    /// It has come back so often that it is put right ever more seldom.
    HeldBack,
    /// It is of another release by now, which has the say.
    NotOurs(String),
    Failed(String),
}

/// What a look at one release has shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Of this revision.
    pub revision: u32,
    pub findings: Vec<Finding>,
    /// Objects that could not be compared, and why.
    pub unseen: Vec<(ObjectId, String)>,
}

/// What looks for drift count, all members of a process together.
#[derive(Clone, Debug, Default)]
pub struct DriftMetrics {
    pub looks: Counter,
    pub requests: Counter,
    pub found: Counter,
    pub healed: Counter,
    pub failed: Counter,
    pub held_back: Counter,
}

impl DriftMetrics {
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("drift_looks", "Looks at a release for drift", &self.looks),
            (
                "drift_requests",
                "Requests made in looking for drift and putting it right",
                &self.requests,
            ),
            (
                "drift_objects_found",
                "Objects found not to be as their chart has them, each time anew",
                &self.found,
            ),
            ("drift_objects_healed", "Objects put right", &self.healed),
            (
                "drift_heals_failed",
                "Attempts to put an object right that failed",
                &self.failed,
            ),
            (
                "drift_heals_held_back",
                "Objects left as they are for now, since somebody else changes them again and again",
                &self.held_back,
            ),
        ] {
            registry.register(name, help, counter.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(mode: Option<&str>, ignore: Option<&str>) -> Wanted {
        let policy = DriftPolicy {
            mode: DriftMode::Warn,
            interval_seconds: 60,
        };
        Wanted::of(&policy, |name| match name {
            DRIFT_ANNOTATION => mode,
            DRIFT_IGNORE_ANNOTATION => ignore,
            _ => None,
        })
    }

    #[test]
    fn tenant_annotation_overrides_drift_mode_unless_invalid() {
        for (annotation, mode, mistaken) in [
            (None, DriftMode::Warn, false),
            (Some("heal"), DriftMode::Heal, false),
            (Some("off"), DriftMode::Off, false),
            (Some("Heal"), DriftMode::Warn, true),
            (Some(""), DriftMode::Warn, true),
        ] {
            let found = wanted(annotation, None);
            assert_eq!(found.mode, mode, "{annotation:?}");
            assert_eq!(found.mistaken.is_some(), mistaken, "{annotation:?}");
        }
        let found = wanted(None, Some("/spec/replicas, spec/image"));
        assert_eq!(found.rules.len(), 1);
        assert!(found.mistaken.unwrap().contains("spec/image"));
    }

    #[test]
    fn drift_interval_is_clamped_between_second_and_day() {
        for (given, taken) in [(0, 1), (60, 60), (u32::MAX, 86_400)] {
            let policy = DriftPolicy {
                mode: DriftMode::Warn,
                interval_seconds: given,
            };
            assert_eq!(Wanted::of(&policy, |_| None).interval_seconds, taken);
        }
    }
}
