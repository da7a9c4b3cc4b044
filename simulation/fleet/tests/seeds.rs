//! A seed determines its run.

use std::path::Path;
use std::process::Command;

use krypton_sim::batch::run_all;
use krypton_sim::coverage::Coverage;
use krypton_sim::oracles::Violation;
use krypton_sim::plan::Plan;
use krypton_sim::run::run;
use krypton_sim::walk::request_fault_plans;
use parking_lot::Mutex;

/// Number of plans of each size.
const LONG: u64 = 20;
const SHORT: u64 = 2_000;
/// All request faults would take minutes. This has no common divisor with the three faults of each request.
const PLAN_STEP: usize = 50;

/// The trace without the lines that real clocks and random file names determine. The event recorder of kube names an
/// event by the time, and Helm's arguments contain paths.
fn comparable_trace(plan: &Plan) -> Vec<String> {
    let mut lines = Vec::new();
    let mut record = |observation: &krypton_sim::observe::Observation| {
        let line = observation.to_string();
        if !line.contains("events/") && !line.contains(" starts: ") {
            lines.push(line);
        }
    };
    let outcome = run(plan, &mut record).expect("there is room for files");
    lines.push(format!("{:?}", outcome.violation));
    lines
}

#[test]
fn equal_seeds_run_alike() {
    for seed in [3, 11] {
        let plan = Plan::new(seed);
        let (first, second) = (comparable_trace(&plan), comparable_trace(&plan));
        for (number, (one, other)) in first.iter().zip(&second).enumerate() {
            assert_eq!(one, other, "line {number} of seed {seed}");
        }
        assert_eq!(first.len(), second.len());
        assert!(first.len() > 500, "{} lines", first.len());
    }
}

/// Runs the plans, and fails with the first violation of each.
fn assert_all_pass(plans: &[Plan]) -> Coverage {
    let failures = Mutex::new(Vec::new());
    let on_failure = |plan: Plan, violation: &Violation| {
        failures
            .lock()
            .push(format!("{violation}; make sim shrinks this plan:\n{plan}"));
    };
    let totals = run_all(2, |index| plans.get(index).cloned(), on_failure);
    let totals = totals.expect("there is room for files");
    assert_eq!(totals.runs, plans.len());
    let failures = failures.into_inner();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    totals.coverage
}

#[test]
fn first_seeds_keep_all_guarantees() {
    let plans: Vec<Plan> = (1..=LONG).map(Plan::new).collect();
    let all = assert_all_pass(&plans);
    // Otherwise no request fault would reach some writes.
    let walked = assert_all_pass(&plans_in("walks"));
    let (all, walked) = (all.writes(), walked.writes());
    let missed: Vec<_> = all.difference(&walked).collect();
    assert!(missed.is_empty(), "no plan in walks has {missed:?}");
}

#[test]
fn short_seeds_keep_all_guarantees() {
    let plans: Vec<Plan> = (1..=SHORT).map(Plan::short).collect();
    assert_all_pass(&plans);
}

fn read_plan(path: &Path) -> Plan {
    let text = std::fs::read_to_string(path).expect("the file can be read");
    text.parse().expect("the file contains a plan")
}

fn plans_in(folder: &str) -> Vec<Plan> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let files = std::fs::read_dir(folder).expect("the folder exists");
    let plans: Vec<Plan> = files
        .map(|file| read_plan(&file.expect("the folder can be read").path()))
        .collect();
    assert!(!plans.is_empty());
    plans
}

/// Each plan once found a defect of the product.
#[test]
fn plans_of_fixed_defects_pass() {
    assert_all_pass(&plans_in("corpus"));
}

/// The first line of each plan describes it.
#[test]
fn scenarios_keep_all_guarantees() {
    assert_all_pass(&plans_in("scenarios"));
}

/// `make nightly` runs all.
#[test]
fn fleet_survives_strike_at_each_request() {
    let plans = plans_in("walks").into_iter();
    let faulty = plans.flat_map(|plan| request_fault_plans(&plan).expect("the plan itself passes"));
    let some: Vec<Plan> = faulty.step_by(PLAN_STEP).collect();
    assert!(some.len() > 20, "{}", some.len());
    assert_all_pass(&some);
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "git does not run in the simulation"
)]
fn each_defect_patch_applies() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = std::fs::read_dir(folder.join("defects")).expect("defects is a folder");
    let files = files.map(|file| file.expect("the folder is readable").path());
    let patches: Vec<_> = files
        .filter(|file| {
            file.extension()
                .is_some_and(|extension| extension == "patch")
        })
        .collect();
    assert!(patches.len() > 80, "{patches:?}");
    for patch in patches {
        let mut git = Command::new("git");
        git.args(["apply", "--check"]).arg(&patch);
        let output = git.current_dir(folder.join("../..")).output();
        let output = output.expect("git is installed");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {error}", patch.display());
    }
}
