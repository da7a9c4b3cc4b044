//! Merges the values of individual members: selects the chart state for each member, and reports problems.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, ValuesReference};
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::{ChartState, DesiredState};
use serde_json::{Map, Value};
use tokio::sync::watch;

use super::FleetChart;
use crate::chart::values::{self, Place, Problem, Readings, Source};
use crate::chart::values_status;
use crate::members::observation::Values;

/// Exchanges values with their reader: the requested locations, and the values read there.
#[derive(Debug)]
pub struct Overlaying {
    /// Sources of the fleet's own values.
    pub fixed: Vec<Source>,
    pub wanted: watch::Sender<BTreeSet<Place>>,
    pub readings: watch::Receiver<Arc<Readings>>,
}

/// Members with their own values, by name.
#[derive(Debug, Default)]
pub(super) struct Overlays(BTreeMap<String, Overlay>);

/// The last chart state for one member, and its inputs.
#[derive(Debug)]
struct Overlay {
    fleet: Arc<ChartState>,
    readings: Arc<Readings>,
    inline: Option<Map<String, Value>>,
    from: Vec<ValuesReference>,
    made: Result<Arc<ChartState>, Problem>,
    /// The last good chart state. The member keeps it while its values are unavailable.
    good: Option<Arc<ChartState>>,
}

/// The chart state for one member.
#[derive(Debug)]
pub(super) struct Chart {
    /// `None` if the member keeps its current one.
    pub chart: Option<Arc<ChartState>>,
    /// Whether it differs from the fleet's.
    pub own: bool,
    pub values: Values,
}

impl Overlays {
    /// Returns the chart state for a member. `had` returns the last one that the hub sent.
    pub(crate) fn of(
        &mut self,
        (name, object): (&str, &EdgeCluster),
        given: &FleetChart,
        readings: &Arc<Readings>,
        had: impl FnOnce() -> Option<ChartState>,
    ) -> Chart {
        let spec = &object.spec;
        let fleet_values = || match &given.problem {
            None => Values::Plain,
            Some(Problem::NotYet(_)) => Values::NotKnown,
            Some(problem) => {
                let has_good = given.chart.is_some();
                let meanwhile = values_status::meanwhile(has_good);
                let mut state = problem.state(meanwhile);
                state.message.insert_str(0, "the fleet's values: ");
                Values::Said(state)
            }
        };
        let Some(fleet) = &given.chart else {
            return Chart {
                chart: None,
                own: false,
                values: fleet_values(),
            };
        };
        if !values::has_own(spec) {
            self.0.remove(name);
            return Chart {
                chart: Some(Arc::clone(fleet)),
                own: false,
                values: fleet_values(),
            };
        }
        let overlay = self.made(name, fleet, spec, readings, had);
        let values = match (&overlay.made, fleet_values()) {
            (Ok(_), Values::Said(state)) => Values::Said(state),
            (Ok(_), _) => {
                let message = "the member overrides values of the fleet";
                Values::Said(State::new(Truth::True, reason::RESOLVED, message))
            }
            (Err(Problem::NotYet(_)), _) => Values::NotKnown,
            (Err(problem), _) => {
                let meanwhile = match overlay.good {
                    Some(_) => "the member stays with the last good chart and values",
                    None => "the member keeps its current values until then",
                };
                Values::Said(problem.state(meanwhile))
            }
        };
        let chart = overlay.made.as_ref().ok().or(overlay.good.as_ref());
        Chart {
            chart: chart.map(Arc::clone),
            own: true,
            values,
        }
    }

    fn made(
        &mut self,
        name: &str,
        fleet: &Arc<ChartState>,
        spec: &EdgeClusterSpec,
        readings: &Arc<Readings>,
        had: impl FnOnce() -> Option<ChartState>,
    ) -> &Overlay {
        let before = self.0.remove(name);
        let as_before = |before: &Overlay| {
            Arc::ptr_eq(&before.fleet, fleet)
                && Arc::ptr_eq(&before.readings, readings)
                && before.inline == spec.values
                && before.from == spec.values_from
        };
        let overlay = match before {
            Some(before) if as_before(&before) => before,
            before => {
                let made = values::member(fleet, spec, readings).map(Arc::new);
                let good = match (&made, before) {
                    (Ok(made), _) => Some(Arc::clone(made)),
                    (Err(_), Some(before)) => before.good,
                    (Err(_), None) => had().map(Arc::new),
                };
                Overlay {
                    fleet: Arc::clone(fleet),
                    readings: Arc::clone(readings),
                    inline: spec.values.clone(),
                    from: spec.values_from.clone(),
                    made,
                    good,
                }
            }
        };
        self.0.entry(name.to_owned()).or_insert(overlay)
    }

    /// Forgets members that left the fleet.
    pub(super) fn keep(&mut self, here: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| here(name));
    }
}

impl Overlaying {
    /// Requests all locations that the fleet or a member names.
    pub fn ask<'a>(&self, objects: impl Iterator<Item = &'a EdgeCluster>) {
        let fixed = self.fixed.iter().map(|source| source.place.clone());
        let of_members = objects
            .flat_map(|object| &object.spec.values_from)
            .filter_map(|reference| Some(Source::of(reference).ok()?.place));
        let places: BTreeSet<Place> = fixed.chain(of_members).collect();
        self.wanted.send_if_modified(|before| {
            let changed = *before != places;
            if changed {
                *before = places;
            }
            changed
        });
    }
}

/// Reports a desired state that exceeds the size of the member's Secret. The member keeps its last one.
pub(super) fn too_large(desired: &DesiredState) -> Option<Values> {
    // The parts common to all members were checked before.
    let alike = desired.deployments.is_empty() && desired.placed.is_empty();
    if alike && desired.namespaces.is_empty() {
        return None;
    }
    let size = desired.size();
    (size > DesiredState::MOST_BYTES).then(|| {
        let message = format!(
            "values, deployments, placed Tenants and workspace labels of this member have {size} bytes as JSON, more than {}; the member keeps its current state until you reduce them",
            DesiredState::MOST_BYTES
        );
        Values::Said(State::new(Truth::False, reason::VALUES_TOO_LARGE, message))
    })
}

#[cfg(test)]
mod tests {
    use krypton_crds::edge_cluster::ValuesKind;
    use serde_json::json;

    use super::*;
    use crate::chart::values::Reading;

    fn chart(version: &str) -> Arc<ChartState> {
        Arc::new(ChartState {
            repo: "https://example.org".to_owned(),
            name: "small".to_owned(),
            version: version.to_owned(),
            ..ChartState::default()
        })
    }

    #[test]
    fn oversized_desired_state_is_rejected_with_reason() {
        let desired = |values: usize, deployments: usize| {
            let mut chart = (*chart("1.0.0")).clone();
            chart
                .values
                .insert("v".to_owned(), "x".repeat(values).into());
            let one = krypton_types::deployment::DesiredDeployment {
                annotations: [("a".to_owned(), "y".repeat(100_000))].into(),
                ..Default::default()
            };
            serde_json::from_value::<DesiredState>(json!({
                "version": {"epoch": 1, "generation": 1}, "chart": chart, "paused": false,
                "deployments": vec![one; deployments],
            }))
            .unwrap()
        };
        assert_eq!(too_large(&desired(900_000, 0)), None);
        assert_eq!(too_large(&desired(900_000, 1)), None);
        let Some(Values::Said(state)) = too_large(&desired(900_000, 2)) else {
            panic!("it is given");
        };
        assert_eq!(state.reason, reason::VALUES_TOO_LARGE);
    }

    fn given(chart: Option<Arc<ChartState>>, problem: Option<Problem>) -> FleetChart {
        FleetChart {
            epoch: 1,
            chart,
            problem,
        }
    }

    fn member(spec: Value) -> EdgeCluster {
        EdgeCluster::new("edge-1", serde_json::from_value(spec).unwrap())
    }

    fn place() -> Place {
        Place {
            kind: ValuesKind::ConfigMap,
            name: "own".to_owned(),
            key: "values.yaml".to_owned(),
        }
    }

    fn readings(reading: Option<Reading>) -> Arc<Readings> {
        Arc::new(Readings {
            by_place: reading
                .map(|reading| (place(), reading))
                .into_iter()
                .collect(),
            salt: None,
        })
    }

    fn values(value: Value) -> Reading {
        Reading::Values(Arc::new(value.as_object().unwrap().clone()))
    }

    #[test]
    fn member_keeps_last_good_values_and_reports_problem() {
        let mut overlays = Overlays::default();
        let object = member(json!({"valuesFrom": [{"kind": "ConfigMap", "name": "own"}]}));
        let at = ("edge-1", &object);
        let first = given(Some(chart("1")), None);
        // The hub knows no values yet, and has sent none.
        let found = overlays.of(at, &first, &readings(None), || None);
        assert!(found.chart.is_none() && found.values == Values::NotKnown);
        let found = overlays.of(at, &first, &readings(Some(values(json!({"a": 1})))), || {
            None
        });
        let good = found.chart.unwrap();
        assert!(found.own && good.values["a"] == 1);
        assert!(matches!(&found.values, Values::Said(state) if state.truth == Truth::True));
        let missing = readings(Some(Reading::Missing(
            "there is no ConfigMap own".to_owned(),
        )));
        // Regardless of the fleet's chart.
        for fleet in [first, given(Some(chart("2")), None)] {
            let found = overlays.of(at, &fleet, &missing, || None);
            assert_eq!(found.chart.as_ref(), Some(&good));
            let Values::Said(state) = found.values else {
                panic!("nothing is said")
            };
            assert_eq!(state.reason, reason::VALUES_MISSING);
            assert!(state.message.contains("ConfigMap own"), "{}", state.message);
        }
        let back = readings(Some(values(json!({"a": 2}))));
        let found = overlays.of(at, &given(Some(chart("2")), None), &back, || None);
        let next = found.chart.unwrap();
        assert_eq!((next.version.as_str(), &next.values["a"]), ("2", &json!(2)));
    }

    #[test]
    fn previously_given_chart_counts_as_last_good() {
        let mut overlays = Overlays::default();
        let object = member(json!({"valuesFrom": [{"kind": "ConfigMap", "name": "own"}]}));
        let missing = readings(Some(Reading::Missing("gone".to_owned())));
        let had = chart("0");
        let found = overlays.of(
            ("edge-1", &object),
            &given(Some(chart("1")), None),
            &missing,
            || Some((*had).clone()),
        );
        assert_eq!(found.chart, Some(had));
    }

    #[test]
    fn member_without_own_values_uses_fleet_values() {
        let mut overlays = Overlays::default();
        let fleet = chart("1");
        let nothing = readings(None);
        for spec in [json!({}), json!({"values": {}})] {
            let object = member(spec);
            let given = given(Some(Arc::clone(&fleet)), None);
            let found = overlays.of(("edge-1", &object), &given, &nothing, || None);
            assert!(!found.own && Arc::ptr_eq(&found.chart.unwrap(), &fleet));
            assert_eq!(found.values, Values::Plain);
        }
        let problem = Problem::Missing {
            place: place(),
            what: "there is no ConfigMap own".to_owned(),
        };
        for chart in [None, Some(Arc::clone(&fleet))] {
            let given = given(chart.clone(), Some(problem.clone()));
            let found = overlays.of(("edge-1", &member(json!({}))), &given, &nothing, || None);
            assert_eq!(found.chart, chart);
            assert!(matches!(&found.values, Values::Said(state) if state.truth == Truth::False));
        }
    }
}
