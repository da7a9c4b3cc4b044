//! Merges the labels and annotations of one member's workspaces: the fleet's, overridden by the member's
//! own.

use krypton_crds::edge_cluster::EdgeClusterSpec;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::namespaces::{ConfigurationError, NamespaceConfiguration};

use crate::members::observation::MemberValuesState;

/// The labels and annotations for one member.
#[derive(Debug)]
pub(super) struct MemberNamespaces {
    pub configuration: NamespaceConfiguration,
    /// Why the member's own settings are not used as written.
    pub problem: Option<MemberValuesState>,
}

/// Returns the labels and annotations for a member. If its settings are invalid, it keeps the ones that
/// `previous` returns, the last that the hub sent. A hub that has sent none uses the valid part.
pub(super) fn merge_for_member(
    fleet: &NamespaceConfiguration,
    spec: &EdgeClusterSpec,
    previous: impl FnOnce() -> Option<NamespaceConfiguration>,
) -> MemberNamespaces {
    match merge(fleet, spec) {
        Ok(configuration) => MemberNamespaces {
            configuration,
            problem: None,
        },
        Err(error) => {
            let message = format!(
                "spec.namespaceConfiguration: {error}; {}. The member keeps its current configuration; after a restart of the hub, it gets the valid part",
                error.remedy()
            );
            let state = State::new(Truth::False, reason::NAMESPACES_INVALID, message);
            MemberNamespaces {
                configuration: previous().unwrap_or_else(|| valid_part(fleet, spec)),
                problem: Some(MemberValuesState::Reported(state)),
            }
        }
    }
}

/// Returns the fleet's settings, overridden by the valid ones of the member.
fn valid_part(fleet: &NamespaceConfiguration, spec: &EdgeClusterSpec) -> NamespaceConfiguration {
    let Some(own) = &spec.namespace_configuration else {
        return fleet.clone();
    };
    let default = NamespaceConfiguration::default;
    let single = |(key, value): (&String, &String)| [(key.clone(), value.clone())].into();
    let labels = own.labels.iter().map(|pair| NamespaceConfiguration {
        labels: single(pair),
        ..default()
    });
    let annotations = own.annotations.iter().map(|pair| NamespaceConfiguration {
        annotations: single(pair),
        ..default()
    });
    let valid_settings = labels.chain(annotations).filter(|one| one.check().is_ok());
    let merged = valid_settings.fold(fleet.clone(), |all, one| all.overlaid(&one));
    match merged.check() {
        Ok(()) => merged,
        Err(_) => fleet.clone(),
    }
}

fn merge(
    fleet: &NamespaceConfiguration,
    spec: &EdgeClusterSpec,
) -> Result<NamespaceConfiguration, ConfigurationError> {
    let Some(own) = &spec.namespace_configuration else {
        return Ok(fleet.clone());
    };
    let own = NamespaceConfiguration {
        labels: own.labels.clone(),
        annotations: own.annotations.clone(),
    };
    own.check()?;
    // Each may be within its limits, and both together not.
    let merged = fleet.overlaid(&own);
    merged.check()?;
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn configuration(value: serde_json::Value) -> NamespaceConfiguration {
        serde_json::from_value(value).unwrap()
    }

    fn spec(value: serde_json::Value) -> EdgeClusterSpec {
        serde_json::from_value(json!({"namespaceConfiguration": value})).unwrap()
    }

    #[test]
    fn member_namespace_settings_override_fleet_settings() {
        let fleet = configuration(json!({"labels": {"team": "a", "zone": "1"}}));
        let same = spec(json!({"labels": {"team": "a"}}));
        for unchanged in [EdgeClusterSpec::default(), same] {
            let merged = merge_for_member(&fleet, &unchanged, || None);
            assert_eq!(merged.configuration, fleet);
        }
        let own = spec(json!({"labels": {"zone": "2"}, "annotations": {"note": "x"}}));
        let merged = merge_for_member(&fleet, &own, || None);
        let expected = json!({"labels": {"team": "a", "zone": "2"}, "annotations": {"note": "x"}});
        assert_eq!(merged.configuration, configuration(expected));
        assert!(merged.problem.is_none());
    }

    #[test]
    fn invalid_namespace_settings_are_reported_and_ignored() {
        let fleet = configuration(json!({"labels": {"team": "a"}}));
        let previous = configuration(json!({"labels": {"team": "b"}}));
        for invalid in [
            json!({"labels": {"mesh.openkcm.io/created-for": "me"}}),
            json!({"labels": {"team": "not a value"}}),
            json!({"annotations": {"a note": "x"}}),
        ] {
            let merged = merge_for_member(&fleet, &spec(invalid), || Some(previous.clone()));
            assert_eq!(merged.configuration, previous);
            let Some(MemberValuesState::Reported(state)) = merged.problem else {
                panic!("nothing is said");
            };
            assert_eq!(state.truth, Truth::False);
            assert_eq!(state.reason, reason::NAMESPACES_INVALID);
        }
        // A hub that has just started: the member still needs the valid part.
        let partly_valid = spec(json!({"labels": {"a b": "", "zone": "1"}}));
        let merged = merge_for_member(&fleet, &partly_valid, || None);
        let expected = configuration(json!({"labels": {"team": "a", "zone": "1"}}));
        assert_eq!(merged.configuration, expected);
        assert!(merged.problem.is_some());
        let many = |prefix: &str| -> serde_json::Value {
            let keys = (0..40).map(|n| (format!("{prefix}{n}"), json!("v")));
            json!({"labels": keys.collect::<serde_json::Map<_, _>>()})
        };
        let too_many = merge_for_member(&configuration(many("a")), &spec(many("b")), || None);
        assert!(too_many.problem.is_some());
    }
}
