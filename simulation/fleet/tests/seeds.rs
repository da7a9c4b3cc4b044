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
