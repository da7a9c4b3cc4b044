//! Merges the values of individual members: selects the chart state for each member, and reports problems.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use krypton_crds::edge_cluster::{EdgeCluster, EdgeClusterSpec, ValuesReference};
use krypton_runtime::newest::SendIfChanged as _;
use krypton_types::conditions::{State, Truth, reason};
use krypton_types::desired::{ChartState, DesiredState};
use serde_json::{Map, Value};
use tokio::sync::watch;

use super::FleetChart;
use crate::chart::values::{self, ValuesLocation, ValuesProblem, ValuesReadings, ValuesSource};
use crate::chart::values_status;
use crate::members::observation::MemberValuesState;

/// Exchanges values with their reader: the requested locations, and the values read there.
#[derive(Debug)]
pub struct MemberValues {
    /// Sources of the fleet's own values.
    pub fleet_sources: Vec<ValuesSource>,
    pub requested: watch::Sender<BTreeSet<ValuesLocation>>,
    pub readings: watch::Receiver<Arc<ValuesReadings>>,
}

/// Members with their own values, by name.
#[derive(Debug, Default)]
pub(super) struct MemberCharts(BTreeMap<String, MemberChartEntry>);

/// The last chart state for one member, and its inputs.
#[derive(Debug)]
struct MemberChartEntry {
    fleet: Arc<ChartState>,
    readings: Arc<ValuesReadings>,
    values: Option<Map<String, Value>>,
    values_from: Vec<ValuesReference>,
    merged: Result<Arc<ChartState>, ValuesProblem>,
    /// The last good chart state. The member keeps it while its values are unavailable.
    last_good: Option<Arc<ChartState>>,
}

/// The chart state for one member.
#[derive(Debug)]
pub(super) struct MemberChart {
    /// `None` if the member keeps its current one.
    pub chart: Option<Arc<ChartState>>,
    /// Whether it differs from the fleet's.
    pub is_override: bool,
    pub values: MemberValuesState,
}

impl MemberCharts {
    /// Returns the chart state for a member. `previous_chart` returns the last one that the hub sent.
    pub(crate) fn chart_for(
        &mut self,
        (name, object): (&str, &EdgeCluster),
        fleet_chart: &FleetChart,
        readings: &Arc<ValuesReadings>,
        previous_chart: impl FnOnce() -> Option<ChartState>,
    ) -> MemberChart {
        let spec = &object.spec;
        let fleet_values = || match &fleet_chart.problem {
            None => MemberValuesState::FleetOnly,
            Some(ValuesProblem::NotYet(_)) => MemberValuesState::Unknown,
            Some(problem) => {
                let has_chart = fleet_chart.chart.is_some();
                let effect = values_status::effect_on_members(has_chart);
                let mut state = problem.state(effect);
                state.message.insert_str(0, "the fleet's values: ");
                MemberValuesState::Reported(state)
            }
        };
        let has_own_values = values::has_own_values(spec);
        if !has_own_values {
            self.0.remove(name);
        }
        let Some(fleet) = fleet_chart.chart.as_ref().filter(|_| has_own_values) else {
            return MemberChart {
                chart: fleet_chart.chart.clone(),
                is_override: false,
                values: fleet_values(),
            };
        };
        let entry = self.entry(name, fleet, spec, readings, previous_chart);
        let values = match (&entry.merged, fleet_values()) {
            (Ok(_), MemberValuesState::Reported(state)) => MemberValuesState::Reported(state),
            (Ok(_), _) => {
                let message = "the member overrides values of the fleet";
                MemberValuesState::Reported(State::new(Truth::True, reason::RESOLVED, message))
            }
            (Err(ValuesProblem::NotYet(_)), _) => MemberValuesState::Unknown,
            (Err(problem), _) => {
                let effect = match entry.last_good {
                    Some(_) => "the member keeps the last good chart and values",
                    None => "the member keeps its current values until then",
                };
                MemberValuesState::Reported(problem.state(effect))
            }
        };
        let chart = entry.merged.as_ref().ok().or(entry.last_good.as_ref());
        MemberChart {
            chart: chart.cloned(),
            is_override: true,
            values,
        }
    }

    fn entry(
        &mut self,
        name: &str,
        fleet: &Arc<ChartState>,
        spec: &EdgeClusterSpec,
        readings: &Arc<ValuesReadings>,
        previous_chart: impl FnOnce() -> Option<ChartState>,
    ) -> &MemberChartEntry {
        let previous = self.0.remove(name);
        let is_unchanged = |previous: &MemberChartEntry| {
            Arc::ptr_eq(&previous.fleet, fleet)
                && Arc::ptr_eq(&previous.readings, readings)
                && previous.values == spec.values
                && previous.values_from == spec.values_from
        };
        let entry = match previous {
            Some(previous) if is_unchanged(&previous) => previous,
            previous => {
                let merged = values::for_member(fleet, spec, readings).map(Arc::new);
                let last_good = match (&merged, previous) {
                    (Ok(merged), _) => Some(Arc::clone(merged)),
                    (Err(_), Some(previous)) => previous.last_good,
                    (Err(_), None) => previous_chart().map(Arc::new),
                };
                MemberChartEntry {
                    fleet: Arc::clone(fleet),
                    readings: Arc::clone(readings),
                    values: spec.values.clone(),
                    values_from: spec.values_from.clone(),
                    merged,
                    last_good,
                }
            }
        };
        self.0.entry(name.to_owned()).or_insert(entry)
    }

    /// Forgets members that left the fleet.
    pub(super) fn retain(&mut self, exists: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| exists(name));
    }
}

impl MemberValues {
    /// Requests all locations that the fleet or a member names.
    pub fn request<'a>(&self, objects: impl Iterator<Item = &'a EdgeCluster>) {
        let fleet_sources = self
            .fleet_sources
            .iter()
            .map(|source| source.location.clone());
        let member_sources = objects
            .flat_map(|object| &object.spec.values_from)
            .filter_map(|reference| Some(ValuesSource::from_reference(reference).ok()?.location));
        let locations: BTreeSet<ValuesLocation> = fleet_sources.chain(member_sources).collect();
        self.requested.send_if_changed(locations);
    }
}

/// Reports a desired state that exceeds the size of the member's Secret. The member keeps its last one.
pub(super) fn size_problem(desired: &DesiredState) -> Option<MemberValuesState> {
    // The parts common to all members were checked before.
    let is_shared = desired.deployments.is_empty() && desired.placed.is_empty();
    if is_shared && desired.namespaces.is_empty() {
        return None;
    }
    let size = desired.size();
    (size > DesiredState::MAX_BYTES).then(|| {
        let message = format!(
            "values, deployments, placed Tenants and workspace labels of this member have {size} bytes as JSON, more than {}; the member keeps its current state until you reduce them",
            DesiredState::MAX_BYTES
        );
        MemberValuesState::Reported(State::new(Truth::False, reason::VALUES_TOO_LARGE, message))
    })
}

#[cfg(test)]
mod tests {
    use krypton_crds::edge_cluster::ValuesKind;
    use serde_json::json;

    use super::*;
    use crate::chart::values::ValuesReading;

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
        assert_eq!(size_problem(&desired(900_000, 0)), None);
        assert_eq!(size_problem(&desired(900_000, 1)), None);
        let Some(MemberValuesState::Reported(state)) = size_problem(&desired(900_000, 2)) else {
            panic!("it is given");
        };
        assert_eq!(state.reason, reason::VALUES_TOO_LARGE);
    }

    fn fleet_chart(chart: Option<Arc<ChartState>>, problem: Option<ValuesProblem>) -> FleetChart {
        FleetChart {
            epoch: 1,
            chart,
            problem,
        }
    }

    fn member(spec: Value) -> EdgeCluster {
        EdgeCluster::new("edge-1", serde_json::from_value(spec).unwrap())
    }

    fn location() -> ValuesLocation {
        ValuesLocation {
            kind: ValuesKind::ConfigMap,
            name: "own".to_owned(),
            key: "values.yaml".to_owned(),
        }
    }

    fn readings(reading: Option<ValuesReading>) -> Arc<ValuesReadings> {
        Arc::new(ValuesReadings {
            by_location: reading
                .map(|reading| (location(), reading))
                .into_iter()
                .collect(),
            salt: None,
        })
    }

    fn values(value: Value) -> ValuesReading {
        ValuesReading::Values(Arc::new(value.as_object().unwrap().clone()))
    }

    impl MemberCharts {
        /// Returns the chart state of a member to which the hub has sent none.
        fn first_chart(
            &mut self,
            object: &EdgeCluster,
            fleet_chart: &FleetChart,
            readings: &Arc<ValuesReadings>,
        ) -> MemberChart {
            self.chart_for(("edge-1", object), fleet_chart, readings, || None)
        }
    }

    #[test]
    fn member_keeps_last_good_values_and_reports_problem() {
        let mut member_charts = MemberCharts::default();
        let object = member(json!({"valuesFrom": [{"kind": "ConfigMap", "name": "own"}]}));
        let [first, second] = ["1", "2"].map(|version| fleet_chart(Some(chart(version)), None));
        // The hub knows no values yet.
        let result = member_charts.first_chart(&object, &first, &readings(None));
        assert!(result.chart.is_none() && result.values == MemberValuesState::Unknown);
        let known = readings(Some(values(json!({"a": 1}))));
        let result = member_charts.first_chart(&object, &first, &known);
        let last_good = result.chart.unwrap();
        assert!(result.is_override && last_good.values["a"] == 1);
        assert!(
            matches!(&result.values, MemberValuesState::Reported(state) if state.truth == Truth::True)
        );
        let missing = readings(Some(ValuesReading::Missing(
            "ConfigMap own does not exist".to_owned(),
        )));
        // Regardless of the fleet's chart.
        for fleet in [&first, &second] {
            let result = member_charts.first_chart(&object, fleet, &missing);
            assert_eq!(result.chart.as_ref(), Some(&last_good));
            let MemberValuesState::Reported(state) = result.values else {
                panic!("nothing is said")
            };
            assert_eq!(state.reason, reason::VALUES_MISSING);
            assert!(state.message.contains("ConfigMap own"), "{}", state.message);
        }
        let recovered = readings(Some(values(json!({"a": 2}))));
        let result = member_charts.first_chart(&object, &second, &recovered);
        let next = result.chart.unwrap();
        assert_eq!((next.version.as_str(), &next.values["a"]), ("2", &json!(2)));
    }

    #[test]
    fn previously_given_chart_counts_as_last_good() {
        let mut member_charts = MemberCharts::default();
        let object = member(json!({"valuesFrom": [{"kind": "ConfigMap", "name": "own"}]}));
        let missing = readings(Some(ValuesReading::Missing("gone".to_owned())));
        let previous = chart("0");
        let result = member_charts.chart_for(
            ("edge-1", &object),
            &fleet_chart(Some(chart("1")), None),
            &missing,
            || Some((*previous).clone()),
        );
        assert_eq!(result.chart, Some(previous));
    }

    #[test]
    fn member_without_own_values_uses_fleet_values() {
        let mut member_charts = MemberCharts::default();
        let fleet = chart("1");
        let nothing = readings(None);
        for spec in [json!({}), json!({"values": {}})] {
            let object = member(spec);
            let fleet_chart = fleet_chart(Some(Arc::clone(&fleet)), None);
            let result = member_charts.first_chart(&object, &fleet_chart, &nothing);
            assert!(!result.is_override && Arc::ptr_eq(&result.chart.unwrap(), &fleet));
            assert_eq!(result.values, MemberValuesState::FleetOnly);
        }
        let problem = ValuesProblem::Missing {
            location: location(),
            message: "ConfigMap own does not exist".to_owned(),
        };
        for chart in [None, Some(Arc::clone(&fleet))] {
            let fleet_chart = fleet_chart(chart.clone(), Some(problem.clone()));
            let result = member_charts.first_chart(&member(json!({})), &fleet_chart, &nothing);
            assert_eq!(result.chart, chart);
            assert!(
                matches!(&result.values, MemberValuesState::Reported(state) if state.truth == Truth::False)
            );
        }
    }
}
