use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::coverage::action_kind;

proptest! {
    #[test]
    fn plan_round_trips_through_its_text(seed in any::<u64>()) {
        let plan = Plan::new(seed);
        let text = plan.to_string();
        prop_assert_eq!(text.parse::<Plan>().unwrap(), plan, "{}", text);
    }

    #[test]
    fn only_permanent_faults_outlast_the_chaos(seed in any::<u64>()) {
        let plan = Plan::new(seed);
        let mut permanent = 0;
        for step in &plan.steps {
            match step.action.length() {
                Some(FOREVER) => permanent += 1,
                length => {
                    let until = step.at + length.unwrap_or_default();
                    prop_assert!(until <= plan.settings.chaos, "{}", step.action);
                }
            }
        }
        prop_assert_eq!(permanent, usize::from(seed % 4 == 3));
        // A hub with a kubeconfig replaces an agent.
        let replaced = plan.settings.edges.iter().any(|edge| edge.access == Access::Both);
        prop_assert!(replaced || plan.separated_member().is_some() == (seed % 4 == 3));
    }

    #[test]
    fn steps_name_existing_hosts_and_clusters(seed in any::<u64>()) {
        let plan = Plan::new(seed);
        let mut names: BTreeSet<String> = plan.settings.clusters().into_iter().collect();
        names.extend(plan.settings.hosts());
        names.extend(plan.settings.tenants.iter().map(|tenant| tenant.name.clone()));
        for step in &plan.steps {
            for need in step.action.required_names() {
                prop_assert!(names.contains(need), "{}: {need}", step.action);
            }
        }
    }

    #[test]
    fn settings_stay_within_their_ranges(seed in any::<u64>()) {
        let settings = Plan::new(seed).settings;
        prop_assert!((1..=2).contains(&settings.hubs));
        prop_assert!((1..=3).contains(&settings.edges.len()));
        prop_assert!((2..=6).contains(&settings.tenants.len()));
        prop_assert!((30_000..=300_000).contains(&settings.chaos));
    }
}

#[test]
fn every_kind_of_step_is_drawn() {
    let plans: Vec<Plan> = (0..400).map(Plan::new).collect();
    let steps = plans.iter().flat_map(|plan| &plan.steps);
    let verbs: BTreeSet<String> = steps.map(|step| action_kind(&step.action)).collect();
    assert_eq!(verbs.len(), 72, "{verbs:#?}");
}

#[test]
fn suspended_tenant_resumes_at_the_end() {
    let paused = (0..400).map(Plan::new).find_map(|plan| {
        let pause = plan.steps.iter().rposition(|step| {
            let Action::Tenant { action, .. } = &step.action else {
                return false;
            };
            *action == TenantAction::Pause
        })?;
        Some((plan, pause))
    });
    let (plan, pause) = paused.unwrap();
    let Action::Tenant {
        cluster, tenant, ..
    } = &plan.steps[pause].action
    else {
        panic!("not a Tenant");
    };
    let resume = Action::Tenant {
        cluster: cluster.clone(),
        tenant: tenant.clone(),
        action: TenantAction::Resume,
    };
    let later = &plan.steps[pause..];
    assert!(later.iter().any(|step| step.action == resume), "{plan}");
}

#[test]
fn step_is_printed_as_readable_line() {
    let rows = [
        "12.500 crash hub-0 restart 3.000",
        "0.001 crash agent-edge-1 at-request 17 restart ever",
        "0.001 lose-answer hub-0 at-request 17",
        "1.000 link hub-0 <-> edge-1 delay 0.500 for 10.000",
        "1.000 half-open agent-edge-1 -> hub-0",
        "1.000 skew hub-1 by -3.250",
        "1.000 pass-days 6",
        "1.000 stop hub-0 for 4.000",
        "1.000 stop agent-edge-1 for ever",
        "1.000 copy-agent edge-1 for 5.000",
        "1.000 hostile-agent edge-1 for 5.000",
        "1.000 member edge-1 add-twin for 5.000",
        "1.000 rotate-ca",
        "1.000 delete-epoch",
        "9.000 tenant home/t1 create on edge-2",
        "9.000 deployment d0 move to edge-1",
        "9.000 deployment d0 orphan",
        "9.000 tenant home/t1 name edge-2",
        "9.000 tenant home/t1 rewrite naming edge-2",
        "9.000 tenant home/t1 adopt",
        "9.000 member edge-1 policy uninstall",
        "9.000 member edge-1 orphan",
        "9.000 member edge-1 allow tenants",
        "9.000 member edge-1 allow-all",
        "9.000 member edge-1 rebuild",
        "9.000 member edge-1 replace",
        "9.000 delete-home-crd edgeclusters",
        "9.000 member edge-1 relabel-kubeconfig for 2.000",
    ];
    for row in rows {
        let plan: Plan = row.parse().unwrap();
        assert_eq!(plan.steps.len(), 1);
        assert!(plan.to_string().ends_with(&format!("{row}\n")), "{plan}");
    }
}

#[test]
fn unknown_line_is_rejected() {
    for line in [
        "12.5 crash hub-0 restart 3.000",
        "1.000 explode hub-0",
        "hubs",
        "x",
    ] {
        assert!(line.parse::<Plan>().is_err(), "{line}");
    }
    assert!("# a comment\n\nseed 3".parse::<Plan>().is_ok());
}
