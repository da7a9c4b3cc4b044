//! A seed determines its run.

use krypton_sim::plan::Plan;
use krypton_sim::run::run;

/// What happened, without what real clocks and random file names determine: kube's event recorder names an event by the
/// time, and Helm's arguments contain paths.
fn story(plan: &Plan) -> Vec<String> {
    let mut story = Vec::new();
    let mut see = |seen: &krypton_sim::observe::Observation| {
        let line = seen.to_string();
        if !line.contains("events/") && !line.contains(" starts: ") {
            story.push(line);
        }
    };
    let outcome = run(plan, &mut see).expect("there is room for files");
    story.push(format!("{:?}", outcome.violation));
    story
}

#[test]
fn equal_seeds_run_alike() {
    for seed in [3, 11] {
        let plan = Plan::new(seed);
        let (first, second) = (story(&plan), story(&plan));
        for (number, (one, other)) in first.iter().zip(&second).enumerate() {
            assert_eq!(one, other, "line {number} of seed {seed}");
        }
        assert_eq!(first.len(), second.len());
        assert!(first.len() > 500, "{} lines", first.len());
    }
}

fn assert_passes(name: &str, plan: &Plan) {
    let outcome = run(plan, &mut |_| ()).expect("there is room for files");
    if let Some(violation) = outcome.violation {
        panic!("{name}: {violation}; shrink it with make sim");
    }
}

#[test]
fn first_seeds_keep_all_guarantees() {
    for seed in 1..=8 {
        assert_passes(&format!("seed {seed}"), &Plan::new(seed));
    }
}

/// Each plan once found a defect of the product.
#[test]
fn plans_of_fixed_defects_pass() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus");
    let mut plans = 0;
    for file in std::fs::read_dir(folder).expect("the folder exists") {
        let path = file.expect("the folder can be read").path();
        let text = std::fs::read_to_string(&path).expect("the file can be read");
        let plan = text.parse().expect("the file contains a plan");
        assert_passes(&path.display().to_string(), &plan);
        plans += 1;
    }
    assert!(plans > 0);
}
