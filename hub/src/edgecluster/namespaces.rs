//! Merges the labels and annotations of one member's workspaces: the fleet's, overridden by the member's
//! own.

use krypton_crds::edge_cluster::EdgeClusterSpec;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::namespaces::{ConfigurationError, NamespaceConfiguration};

use crate::members::observation::Values;

/// The labels and annotations for one member.
#[derive(Debug)]
pub(super) struct Namespaces {
    pub configuration: NamespaceConfiguration,
    /// Whether they differ from the fleet's.
    pub own: bool,
    /// Why the member's own settings are not used as written.
    pub problem: Option<Values>,
}

/// Returns the labels and annotations for a member. If its settings are invalid, it keeps the ones that
/// `had` returns, the last that the hub sent. A hub that has sent none uses the valid part.
pub(super) fn of_member(
    fleet: &NamespaceConfiguration,
    spec: &EdgeClusterSpec,
    had: impl FnOnce() -> Option<NamespaceConfiguration>,
) -> Namespaces {
    match merged(fleet, spec) {
        Ok(configuration) => Namespaces {
            own: configuration != *fleet,
            configuration,
            problem: None,
        },
        Err(error) => {
            let message = format!(
                "spec.namespaceConfiguration: {error}; {}. The member keeps its current configuration; after a restart of the hub, it gets the valid part",
                error.remedy()
            );
            let state = State::new(Truth::False, reason::NAMESPACES_INVALID, message);
            Namespaces {
                configuration: had().unwrap_or_else(|| usable(fleet, spec)),
                own: true,
                problem: Some(Values::Said(state)),
            }
        }
    }
}

/// Returns the fleet's settings, overridden by the valid ones of the member.
fn usable(fleet: &NamespaceConfiguration, spec: &EdgeClusterSpec) -> NamespaceConfiguration {
    let Some(own) = &spec.namespace_configuration else {
        return fleet.clone();
    };
    let default = NamespaceConfiguration::default;
    let of_one = |(key, value): (&String, &String)| [(key.clone(), value.clone())].into();
    let labels = own.labels.iter().map(|pair| NamespaceConfiguration {
        labels: of_one(pair),
        ..default()
    });
    let annotations = own.annotations.iter().map(|pair| NamespaceConfiguration {
        annotations: of_one(pair),
        ..default()
    });
    let usable = labels.chain(annotations).filter(|one| one.check().is_ok());
    let merged = usable.fold(fleet.clone(), |all, one| all.overlaid(&one));
    match merged.check() {
        Ok(()) => merged,
        Err(_) => fleet.clone(),
    }
}

fn merged(
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
        let none = of_member(&fleet, &EdgeClusterSpec::default(), || None);
        assert_eq!((none.configuration, none.own), (fleet.clone(), false));
        let same = of_member(&fleet, &spec(json!({"labels": {"team": "a"}})), || None);
        assert_eq!((same.configuration, same.own), (fleet.clone(), false));
        let own = spec(json!({"labels": {"zone": "2"}, "annotations": {"note": "x"}}));
        let own = of_member(&fleet, &own, || None);
        let expected = json!({"labels": {"team": "a", "zone": "2"}, "annotations": {"note": "x"}});
        assert_eq!(own.configuration, configuration(expected));
        assert!(own.own && own.problem.is_none());
    }

    #[test]
    fn invalid_namespace_settings_are_reported_and_ignored() {
        let fleet = configuration(json!({"labels": {"team": "a"}}));
        let had = configuration(json!({"labels": {"team": "b"}}));
        for bad in [
            json!({"labels": {"mesh.openkcm.io/created-for": "me"}}),
            json!({"labels": {"team": "not a value"}}),
            json!({"annotations": {"a note": "x"}}),
        ] {
            let found = of_member(&fleet, &spec(bad), || Some(had.clone()));
            assert_eq!(found.configuration, had);
            let Some(Values::Said(state)) = found.problem else {
                panic!("nothing is said");
            };
            assert_eq!(state.truth, Truth::False);
            assert_eq!(state.reason, reason::NAMESPACES_INVALID);
        }
        // A hub that has just started: the member still needs the valid part.
        let partly = spec(json!({"labels": {"a b": "", "zone": "1"}}));
        let found = of_member(&fleet, &partly, || None);
        let expected = configuration(json!({"labels": {"team": "a", "zone": "1"}}));
        assert_eq!(found.configuration, expected);
        assert!(found.problem.is_some());
        let many = |prefix: &str| -> serde_json::Value {
            let keys = (0..40).map(|n| (format!("{prefix}{n}"), json!("v")));
            json!({"labels": keys.collect::<serde_json::Map<_, _>>()})
        };
        let both = of_member(&configuration(many("a")), &spec(many("b")), || None);
        assert!(both.problem.is_some());
    }
}
