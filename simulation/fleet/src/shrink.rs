//! Finds a smaller plan that fails in the same way, by delta debugging.
//!
//! `run_plan` runs a plan and returns the name of the violated oracle. Call [`shrink`] with a plan that fails.

use crate::plan::{FOREVER, Plan, PlannedTenant, Settings};
use crate::time::Millis;

/// Durations are not shortened below this time.
const SHORTEST: Millis = 100;

/// Result of shrinking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShrunkPlan {
    pub plan: Plan,
    /// Number of runs.
    pub attempts: usize,
}

/// Drops steps, then Tenants, edges and hubs, then shortens durations, while the same `oracle` fails. Runs at most
/// `limit` plans.
pub fn shrink<'a>(
    plan: Plan,
    oracle: &str,
    limit: usize,
    mut run_plan: impl FnMut(&Plan) -> Option<&'a str>,
) -> ShrunkPlan {
    let mut search = ShrinkSearch {
        best: plan,
        attempts: 0,
        limit,
        still_fails: |plan: &Plan| run_plan(plan) == Some(oracle),
    };
    // Each phase can enable another one.
    loop {
        let previous = search.best.clone();
        search.drop_steps();
        search.shrink_settings();
        search.shorten();
        if search.best == previous || search.is_exhausted() {
            break;
        }
    }
    ShrunkPlan {
        plan: search.best,
        attempts: search.attempts,
    }
}

struct ShrinkSearch<F> {
    best: Plan,
    attempts: usize,
    limit: usize,
    still_fails: F,
}

impl<F: FnMut(&Plan) -> bool> ShrinkSearch<F> {
    fn is_exhausted(&self) -> bool {
        self.attempts >= self.limit
    }

    /// Keeps the candidate if it still fails.
    fn try_plan(&mut self, candidate: Plan) -> bool {
        if self.is_exhausted() || candidate == self.best {
            return false;
        }
        self.attempts += 1;
        let still_fails = (self.still_fails)(&candidate);
        if still_fails {
            self.best = candidate;
        }
        still_fails
    }

    /// Drops runs of steps: first halves, at last single steps, the later ones first.
    fn drop_steps(&mut self) {
        let mut size = self.best.steps.len();
        while size > 0 && !self.is_exhausted() {
            let mut end = self.best.steps.len();
            while end > 0 {
                let start = end.saturating_sub(size);
                let mut candidate = self.best.clone();
                candidate.steps.drain(start..end);
                self.try_plan(candidate);
                end = start;
            }
            size /= 2;
        }
    }

    fn shrink_settings(&mut self) {
        for tenant in self.best.settings.tenants.clone() {
            self.try_plan(without_tenant(&self.best, &tenant));
        }
        for edge in self.best.settings.edges.clone() {
            // An empty fleet has nothing to fail, and draws nothing.
            if self.best.settings.edges.len() > 1 {
                self.try_plan(without_edge(&self.best, &edge.name));
            }
        }
        if self.best.settings.hubs > 1 {
            self.try_plan(without_last_hub(&self.best));
        }
        let resets: [fn(&mut Settings); 3] = [
            |settings| settings.self_cluster = false,
            |settings| settings.long_leader_lease = false,
            |settings| settings.crds_exist = false,
        ];
        for reset in resets {
            let mut candidate = self.best.clone();
            reset(&mut candidate.settings);
            if candidate != self.best {
                self.try_plan(candidate);
            }
        }
    }

    /// Halves the lengths of faults and the times before steps.
    fn shorten(&mut self) {
        for index in 0..self.best.steps.len() {
            while let Some(candidate) = with_shorter_step(&self.best, index) {
                if !self.try_plan(candidate) {
                    break;
                }
            }
            while let Some(candidate) = with_earlier_steps(&self.best, index) {
                if !self.try_plan(candidate) {
                    break;
                }
            }
        }
        while let Some(candidate) = with_shorter_chaos(&self.best) {
            if !self.try_plan(candidate) {
                break;
            }
        }
    }
}

fn without_tenant(plan: &Plan, tenant: &PlannedTenant) -> Plan {
    let mut plan = plan.clone();
    plan.settings.tenants.retain(|each| each != tenant);
    let name = tenant.name.as_str();
    plan.steps.retain(|step| !step.action.targets_tenant(name));
    plan
}

fn without_edge(plan: &Plan, edge: &str) -> Plan {
    let mut plan = plan.clone();
    let agent = format!("agent-{edge}");
    plan.settings.edges.retain(|each| each.name != edge);
    plan.settings
        .tenants
        .retain(|tenant| tenant.cluster != edge && tenant.placed_on.as_deref() != Some(edge));
    plan.steps.retain(|step| {
        let names = step.action.required_names();
        !names.iter().any(|name| *name == edge || *name == agent)
    });
    plan
}

fn without_last_hub(plan: &Plan) -> Plan {
    let mut plan = plan.clone();
    plan.settings.hubs -= 1;
    let hub = format!("hub-{}", plan.settings.hubs);
    plan.steps
        .retain(|step| !step.action.required_names().contains(&hub.as_str()));
    plan
}

/// Halves the length of a step, in the steps of the text form.
fn with_shorter_step(plan: &Plan, index: usize) -> Option<Plan> {
    let step = plan.steps.get(index)?;
    let length = step.action.length().filter(|length| *length != FOREVER)?;
    let new_length = (length / 2).max(SHORTEST);
    if new_length >= length {
        return None;
    }
    let mut plan = plan.clone();
    let step = plan.steps.get_mut(index)?;
    step.action = step.action.with_length(new_length);
    Some(plan)
}

/// Halves the time between a step and the previous one, also for all later steps.
fn with_earlier_steps(plan: &Plan, index: usize) -> Option<Plan> {
    let previous = match index.checked_sub(1) {
        Some(previous) => plan.steps.get(previous)?.at,
        None => 0,
    };
    let reduction = plan.steps.get(index)?.at.checked_sub(previous)? / 2;
    if reduction < SHORTEST {
        return None;
    }
    let mut plan = plan.clone();
    for step in plan.steps.iter_mut().skip(index) {
        step.at -= reduction;
    }
    Some(plan)
}

/// Halves the calm time at the end of the chaos.
fn with_shorter_chaos(plan: &Plan) -> Option<Plan> {
    let ends = plan.steps.iter().map(|step| {
        let length = step.action.length().filter(|length| *length != FOREVER);
        step.at + length.unwrap_or_default()
    });
    let last_end = ends.max().unwrap_or_default();
    let reduction = plan.settings.chaos.checked_sub(last_end)? / 2;
    if reduction < SHORTEST {
        return None;
    }
    let mut plan = plan.clone();
    plan.settings.chaos -= reduction;
    Some(plan)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Action;

    fn crashes(plan: &Plan) -> Option<&'static str> {
        let crash = |step: &crate::plan::PlanStep| matches!(step.action, Action::Crash { .. });
        plan.steps.iter().any(crash).then_some("one")
    }

    /// A seed whose plan contains both actions.
    fn plan_with(wanted: impl Fn(&Plan) -> bool) -> Plan {
        (0..2000).map(Plan::new).find(wanted).unwrap()
    }

    #[test]
    fn plan_shrinks_to_the_step_that_fails() {
        let plan = plan_with(|plan| crashes(plan).is_some() && plan.steps.len() > 20);
        let shrunk = shrink(plan, "one", 10_000, crashes).plan;
        assert_eq!(shrunk.steps.len(), 1, "{shrunk}");
        assert_eq!(shrunk.settings.tenants, []);
        assert_eq!(shrunk.settings.edges.len(), 1);
        assert!(shrunk.steps[0].at < 2 * SHORTEST, "{shrunk}");
        assert!(shrunk.settings.chaos < 1_000, "{shrunk}");
    }

    #[test]
    fn two_steps_that_fail_together_stay() {
        let fails = |plan: &Plan| {
            let count = |wanted: fn(&Action) -> bool| {
                plan.steps
                    .iter()
                    .filter(|step| wanted(&step.action))
                    .count()
            };
            let both = count(|action| matches!(action, Action::Freeze { .. })) > 0
                && count(|action| matches!(action, Action::Compact { .. })) > 1;
            both.then_some("both")
        };
        let plan = plan_with(|plan| fails(plan).is_some());
        let shrunk = shrink(plan, "both", 10_000, fails).plan;
        assert_eq!(shrunk.steps.len(), 3, "{shrunk}");
    }

    #[test]
    fn other_oracle_is_not_the_same_failure() {
        let plan = plan_with(|plan| plan.steps.len() > 10);
        let length = plan.steps.len();
        let fails = |plan: &Plan| {
            Some(match plan.steps.len() == length {
                true => "wanted",
                false => "other",
            })
        };
        let shrunk = shrink(plan.clone(), "wanted", 1_000, fails);
        assert_eq!(shrunk.plan.steps.len(), plan.steps.len());
    }

    #[test]
    fn attempts_are_limited() {
        let plan = plan_with(|plan| plan.steps.len() > 20);
        let shrunk = shrink(plan.clone(), "one", 7, |_| None);
        assert_eq!(shrunk.attempts, 7);
        assert_eq!(shrunk.plan, plan);
    }

    #[test]
    fn dropped_part_takes_its_steps_along() {
        let plan = plan_with(|plan| plan.settings.edges.len() == 3 && plan.steps.len() > 20);
        let smaller = without_edge(&plan, "edge-2");
        assert!(!smaller.to_string().contains("edge-2"), "{smaller}");
        let tenant = plan.settings.tenants[0].clone();
        let smaller = without_tenant(&plan, &tenant);
        assert!(!smaller.to_string().contains(&tenant.name), "{smaller}");
    }
}
