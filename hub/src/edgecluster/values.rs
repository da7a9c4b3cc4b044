//! The values that members have of their own: which chart state each is to get, and what is said of it.

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

/// Where the values of members are asked for and found.
#[derive(Debug)]
pub struct Overlaying {
    /// What the fleet itself asks for.
    pub fixed: Vec<Source>,
    pub wanted: watch::Sender<BTreeSet<Place>>,
    pub readings: watch::Receiver<Arc<Readings>>,
}

/// The members with values of their own, by name.
#[derive(Debug, Default)]
pub(super) struct Overlays(BTreeMap<String, Overlay>);

/// What was made of one member's values last, and out of what.
#[derive(Debug)]
struct Overlay {
    fleet: Arc<ChartState>,
    readings: Arc<Readings>,
    inline: Option<Map<String, Value>>,
    from: Vec<ValuesReference>,
    made: Result<Arc<ChartState>, Problem>,
    /// What the member goes on with while its values cannot be had.
    good: Option<Arc<ChartState>>,
}

/// What one member is to get.
#[derive(Debug)]
pub(super) struct Chart {
    /// None: it stays with what it has.
    pub chart: Option<Arc<ChartState>>,
    /// Whether it is that of this member alone.
    pub own: bool,
    pub values: Values,
}

impl Overlays {
    /// What the member is to get; `had` is what it was given last.
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
                let message = "the member has values of its own over the fleet's";
                Values::Said(State::new(Truth::True, reason::RESOLVED, message))
            }
            (Err(Problem::NotYet(_)), _) => Values::NotKnown,
            (Err(problem), _) => {
                let meanwhile = match overlay.good {
                    Some(_) => "the member stays with the last good chart and values",
                    None => "the member stays as it is until then",
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

    /// Members that are no more leave nothing behind.
    pub(super) fn keep(&mut self, here: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| here(name));
    }
}

impl Overlaying {
    /// Asks for all places that the fleet or a member names.
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

/// Said of a desired state that does not go into the Secret in which it is on record on the member, which
/// stays as it is then.
pub(super) fn too_large(desired: &DesiredState) -> Option<Values> {
    // What all have alike was looked at before.
    let alike = desired.deployments.is_empty() && desired.placed.is_empty();
    if alike && desired.namespaces.is_empty() {
        return None;
    }
    let size = desired.size();
    (size > DesiredState::MOST_BYTES).then(|| {
        let message = format!(
            "values, deployments, placed Tenants and labels of workspaces of this member are {size} bytes as JSON, more than {}: it stays as it is until there is less",
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
            install_crds: false,
            values: Map::new(),
            confidential: None,
            pinned: None,
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
        // Nothing is known yet, and nothing was ever given.
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
        // Whatever the fleet is given meanwhile.
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
